"""Nodes and storage: the GPUs of a node, the gangs that hold them, whether it answers; the checkpoints of jobs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId

Holder: TypeAlias = "tuple[JobId, int, int]"
"""A job, its gang, and a rank of it."""

_ROUNDING = 1e-9


class UnsafeOrderError(AssertionError):
    """An order that must never be given: a GPU twice, or a second attempt or gang of a job at the same time."""


@dataclass(frozen=True, slots=True)
class Hold:
    """GPUs and CPUs of a node that one rank holds."""

    gpus: tuple[int, ...]
    share: float
    """Share of each of those GPUs."""
    cpus: float


@dataclass(slots=True)
class MemoryNode:
    """A node; ``node`` is the scheduler's initial view, ``slow`` the extra delay of each message, in seconds.

    By ``clock_ahead`` seconds its clock is ahead of the cluster's time.
    """

    node: Node
    alive: bool = True
    silent: bool = False
    slow: float = 0.0
    clock_ahead: float = 0.0
    died_at: float = 0.0
    lost: set[int] = field(default_factory=set)
    held: dict[Holder, Hold] = field(default_factory=dict)
    abandoned: set[Holder] = field(default_factory=set)
    """Those that the record has given up, as `orch cancel --force` does: for the daemon they are other users of the node."""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Requests that arrived while it was silent."""

    def view(self) -> Node:
        """Return the node as the scheduler sees it."""
        given_up = [self.held[holder] for holder in self.abandoned & self.held.keys()]
        gpus = self.node.other_gpus + len(self.lost) + sum(hold.share * len(hold.gpus) for hold in given_up)
        cpus = self.node.other_cpus + sum(hold.cpus for hold in given_up)
        return replace(self.node, alive=self.alive, reachable=not self.silent, other_gpus=gpus, other_cpus=cpus)

    def take(self, holder: Holder, gpus: float, cpus: float) -> Hold | None:
        """Reserve a rank's share; None when too few healthy GPUs are left, or a gang that was given up holds them.

        Raises UnsafeOrderError where a gang of the record holds them.
        """
        found = self._find(gpus)
        if found is None:
            return None
        if sum(h.cpus for h in self.held.values()) + cpus > self.node.cpus + _ROUNDING:
            if self.abandoned & self.held.keys():
                return None
            raise UnsafeOrderError(f"{holder} gets CPUs of {self.node.id} that {sorted(self.held)} hold")
        hold = self.held[holder] = Hold(found, min(gpus, 1.0), cpus)
        return hold

    def _find(self, gpus: float) -> tuple[int, ...] | None:
        used = dict.fromkeys(range(int(self.node.gpus)), 0.0)
        for hold in self.held.values():
            for index in hold.gpus:
                used[index] += hold.share
        share, count = (gpus, 1) if 0 < gpus < 1 else (1.0, round(gpus))
        fitting = [i for i, taken in used.items() if taken + share <= 1 + _ROUNDING]
        healthy = [i for i in fitting if i not in self.lost]
        if len(fitting) < count and self.abandoned & self.held.keys():
            return None
        if len(fitting) < count:
            raise UnsafeOrderError(f"{gpus:g} GPUs of {self.node.id} are given away twice; {self.held} hold them")
        if len(healthy) < count:
            return None
        healthy.sort(key=lambda i: (-used[i], i))  # as in Ray, a shared GPU is filled first
        return tuple(healthy[:count])

    def uuid(self, index: int) -> str:
        """Return a GPU's UUID."""
        return f"GPU-{self.node.id}-{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint. An empty ``path`` means a snapshot in the memory of its gang."""

    attempt: int
    gang: int
    step: int
    at: float
    path: str


@dataclass(slots=True)
class Checkpoints:
    """The valid checkpoints on storage, ``stored``, by job in the order of saving, and the torn ones, ``broken``."""

    stored: dict[JobId, list[Saved]] = field(default_factory=dict)
    broken: dict[JobId, list[Saved]] = field(default_factory=dict)
    snapshots: dict[JobId, Saved] = field(default_factory=dict)

    def keep(self, job_id: JobId, saved: Saved) -> None:
        """Record a checkpoint that an attempt has saved."""
        if saved.path:
            self.stored.setdefault(job_id, []).append(saved)
        else:
            self.snapshots[job_id] = saved

    def flush(self, job_id: JobId, gang: int, at: float) -> Saved | None:
        """Write the snapshot of a gang to storage before the gang ends."""
        snapshot = self.snapshots.pop(job_id, None)
        if snapshot is None or snapshot.gang != gang:
            return None
        saved = replace(snapshot, at=at, path=path_of(job_id, snapshot.attempt, snapshot.step))
        self.keep(job_id, saved)
        return saved

    def newest(self, job_id: JobId, gang: int) -> Saved | None:
        """Return what an attempt in ``gang`` resumes from: the snapshot in its memory, or the newest on storage."""
        stored = self.stored.get(job_id, [])
        snapshot = self.snapshots.get(job_id)
        found = [*stored, snapshot] if snapshot is not None and snapshot.gang == gang else stored
        return max(found, key=lambda saved: (saved.step, saved.at), default=None)

    def resume(self, job_id: JobId, gang: int) -> int:
        """Return the step at which an attempt in ``gang`` begins."""
        newest = self.newest(job_id, gang)
        return 0 if newest is None else newest.step

    def break_newest(self, job_id: JobId) -> Saved | None:
        """Tear the newest checkpoint on storage and return it; None when there is none."""
        stored = self.stored.get(job_id)
        if not stored:
            return None
        torn = max(stored, key=lambda saved: (saved.step, saved.at))
        stored.remove(torn)
        self.broken.setdefault(job_id, []).append(torn)
        return torn


def path_of(job_id: JobId, attempt: int, step: int) -> str:
    """Return the path of a checkpoint on storage."""
    return f"/checkpoints/{job_id}/{attempt}/{step}"
