"""Copies a rank's state into shared memory: the implementation of ``context().save`` under orch.

Runs in the training process. After the first snapshot of a structure nothing is allocated or planned: the state is
walked once, and its tensors are copied to their places in the tensor file's image. The newest snapshot, and the one
that a persister writes, are never overwritten, so the copy waits for nothing.

A snapshot that is *wanted* on storage (an explicit interval, one of the best scores) is not overwritten before it is
there: a save waits while all slots hold such snapshots and storage works. Where storage fails, training continues and
the skipped snapshots are reported.

In a window in which certain tensors do not change (async_copy.py), a thread copies them while training continues, and
the snapshot counts once they are copied: a process that dies before leaves the previous snapshot.
"""

from __future__ import annotations

import itertools
import sys
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.format import foreign_values as foreign
from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.snapshots.async_copy import WORTH_BYTES, Watch, Window, may_wait
from orchestrator.checkpoint.snapshots.encode_plan import PartPlan
from orchestrator.checkpoint.snapshots.file import (
    HEADER_BYTES,
    SLOTS,
    PartRegion,
    SnapshotDirectory,
    SnapshotMeta,
    SnapshotSlot,
    held,
    identity,
    version_of,
)
from orchestrator.checkpoint.snapshots.tensor_copy import TensorCopy

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.checkpoint.snapshots.top_scores import TopScores

_PAGE = 4096
_STORE_POLL_SECONDS = 0.002
_TREE_SLACK = 1024  # space for plain values that become longer


@dataclass(frozen=True, slots=True)
class LateCopy:
    """The result of a deferred copy: why the snapshot does not count ("" when it does), and the processor time of its thread."""

    failure: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Late:
    """Tensors to copy while training continues, after the rest of the snapshot; or, in a rehearsal, ``copied`` with it."""

    copier: TensorCopy
    sources: Sequence[Any]
    watch: Watch
    copied: bool

    def copy(self) -> bool:
        """Copy the tensors; return whether they stayed unchanged meanwhile."""
        self.copier.copy(self.sources)
        return not self.watch.saw_change(self.copier.targets)

    def is_unchanged(self) -> bool:
        """Whether a copy made now would equal the existing one, and the tensors were not written since."""
        try:
            return not self.watch.saw_any_change(self.copier.targets)
        except Exception:  # torch fails for a tensor that was replaced; no error here may end the training
            return False


class _Copier:
    """The views into one slot for one set of plans."""

    def __init__(
        self,
        slot: SnapshotSlot,
        regions: Mapping[str, PartRegion],
        plans: Mapping[str, PartPlan],
        threads: int,
        pool: ThreadPoolExecutor | None,
    ) -> None:
        self.slot, self.plans = slot, dict(plans)
        self._regions = dict(regions)
        self._tensors: list[tuple[str, int]] = []
        self._threads, self._pool = threads, pool
        self._targets: list[Any] = []
        self._bytes: list[tuple[str, int, int]] = []
        torch = sys.modules.get("torch")
        for name, plan in plans.items():
            start = regions[name].image_at
            slot.memory[start : start + len(plan.header)] = plan.header
            for index, (entry, source) in enumerate(zip(plan.entries, plan.sources, strict=True)):
                at = start + len(plan.header) + entry.begin
                if entry.end == entry.begin:
                    continue
                if torch is not None and isinstance(source, torch.Tensor):
                    view = memoryview(slot.memory)[at : at + entry.end - entry.begin]
                    self._targets.append(torch.frombuffer(view, dtype=source.dtype).reshape(source.shape))
                    self._tensors.append((name, index))
                else:
                    self._bytes.append((name, index, at))
        self._all = self._copies(range(len(self._targets)))
        self._split: list[bool] = []
        self._now = self._later = self._copies(())

    def copy(self, window: Window | None) -> Late | None:
        """Copy the present content of the plans' sources; return what is left to copy later, where that is worthwhile."""
        memory = self.slot.memory
        for name, plan in self.plans.items():
            at = self._regions[name].tree_at
            memory[at : at + len(plan.tree)] = plan.tree
        for name, index, at in self._bytes:
            content = foreign.memory(self.plans[name].sources[index])
            memory[at : at + len(content)] = content
        sources = [self.plans[name].sources[index] for name, index in self._tensors]
        if window is None or sum(plan.data_bytes for plan in self.plans.values()) < WORTH_BYTES:
            self._all.copy(sources)
            return None
        addresses = window.addresses()
        waits = [may_wait(source, addresses) for source in sources]
        waiting = list(itertools.compress(sources, waits))
        if sum(source.numel() * source.element_size() for source in waiting) < WORTH_BYTES:
            self._all.copy(sources)
            return None
        if waits != self._split:
            self._split = waits
            self._now = self._copies([index for index, later in enumerate(waits) if not later])
            self._later = self._copies([index for index, later in enumerate(waits) if later])
        late = Late(self._later, waiting, Watch(waiting), copied=window.rehearse)
        self._now.copy([source for source, later in zip(sources, waits, strict=True) if not later])
        if window.rehearse:
            self._later.copy(waiting)
        return late

    def _copies(self, indices: Sequence[int]) -> TensorCopy:
        return TensorCopy([self._targets[index] for index in indices], threads=self._threads, pool=self._pool)


class SnapshotWriter:
    """Writes the snapshots of one rank. Not thread-safe; the caller serialises."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        attempt: int,
        job_id: str = "",
        token: str = "",
        threads: int = 1,
        later: Executor | None = None,
        best: TopScores | None = None,
    ) -> None:
        """Copy with up to ``threads`` threads; deferred tensors on ``later`` (another thread).

        ``best``: the saves with the best scores are wanted on storage.

        Raises SnapshotUnavailableError when shared memory cannot be used.
        """
        self._directory = SnapshotDirectory(path)
        self._rank, self._world_size, self._attempt = rank, world_size, attempt
        self._job_id, self._token = job_id, token
        self._lock = self._directory.writer_lock(rank)
        self._lock.acquire()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="orch-copy") if threads > 1 else None
        self._executor = later
        self.rest: Future[LateCopy] | None = None
        """The deferred copy of the last save. None: it was complete at once."""
        self.rehearsed: Late | None = None
        """The rehearsal of the last save, to check whether deferring would be safe."""
        self._hold = self._directory.hold()
        self._best = best if rank == 0 else None
        self._store_state = self._directory.store_state(rank)
        self._leader = self._store_state if rank == 0 else self._directory.store_state(0)
        self._late_word = 0
        self.waited_seconds = 0.0
        """How long the last save waited for storage to take an earlier one."""
        self.left_out: list[int] = []
        """Steps that were wanted on storage and were dropped because storage failed."""
        self._slots: dict[int, SnapshotSlot] = {}
        for index in range(SLOTS):
            slot = SnapshotSlot.open(self._directory.slot_path(rank, index))
            if slot is not None:
                self._slots[index] = slot
        self.copy_seconds = 0.0  # what the last snapshot took without planning and allocating
        self._plans: dict[str, PartPlan] = {}
        self._regions: dict[str, PartRegion] = {}
        self._copiers: dict[int, _Copier] = {}

    def save(
        self,
        parts: Mapping[str, Any],
        *,
        step: int,
        gang: bool,
        metrics: Mapping[str, float] | None = None,
        window: Window | None = None,
        wanted: bool = False,
        on_wait: Callable[[], None] | None = None,
    ) -> int:
        """Snapshot ``parts`` (name to state) as of ``step``; return the bytes taken, 0 when this step already exists.

        ``wanted``: it must reach storage. ``on_wait`` is called when the save must first wait for storage.

        Large tensors of the ``window`` may be copied afterwards, until ``rest`` is done; if one changes before, the
        snapshot does not count. Raises SnapshotUnavailableError when shared memory is insufficient,
        UnsupportedStateError as the codec does.
        """
        self._finish()
        self.rehearsed = None
        self.waited_seconds = 0.0
        word = identity(Version(attempt=self._attempt, step=step))
        if any(slot.identity() == word for slot in self._slots.values()):
            return 0
        self._plan(parts)
        try:
            index = self._choose(on_wait)
            wanted = self._is_best(word, metrics or {}) or wanted
            return self._write(index, word, step, gang, metrics or {}, window, wanted)
        finally:
            for plan in self._plans.values():
                plan.forget()

    @property
    def memory_bytes(self) -> int:
        """Return the memory that this rank's snapshots take once every slot is in use."""
        return SLOTS * max((len(slot.memory) for slot in self._slots.values()), default=0)

    def close(self) -> None:
        """Release the writer's lock; the snapshots stay."""
        self._finish()
        if self._executor is not None:
            self._executor.shutdown()
        if self._pool is not None:
            self._pool.shutdown()
        self._lock.release()
        self._hold.close()
        self._copiers.clear()
        self._slots.clear()

    def _later(self, slot: SnapshotSlot, late: Late, word: int) -> Future[LateCopy]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="orch-late-copy")
        try:
            return self._executor.submit(_complete, slot, late, word)
        except RuntimeError:  # the interpreter is ending and starts no more threads
            done: Future[LateCopy] = Future()
            done.set_result(_complete(slot, late, word))
            return done

    def _finish(self) -> None:
        if self.rest is not None:
            wait([self.rest])
            if self._best is not None and self.rest.result().failure:
                self._best.forget(self._late_word)
            self.rest = None

    def _plan(self, parts: Mapping[str, Any]) -> None:
        """Update the plans for the states; lay out anew when a part no longer fits."""
        fresh = parts.keys() != self._plans.keys()
        plans: dict[str, PartPlan] = {}
        for name, state in parts.items():
            plan = self._plans.get(name)
            if plan is None or not plan.update(state):
                plan, fresh = PartPlan(state), True
            plans[name] = plan
            region = self._regions.get(name)
            if region is not None and len(plan.tree) > region.tree_bytes:
                fresh = True
        if fresh:
            self._plans, self._copiers = plans, {}
            self._regions = _lay_out(plans)

    def _is_best(self, word: int, metrics: Mapping[str, float]) -> bool:
        """Whether this save is one of the best so far; the one that it replaces need not reach storage any more."""
        if self._best is None:
            return False
        member, replaced = self._best.offer(word, metrics.get(self._best.attribute))
        if member:
            self._store_state.publish_wanted((self._store_state.wanted() | {word}) - {replaced})
        for slot in self._slots.values() if replaced else ():
            if slot.identity() == replaced:
                slot.want(0)
        return member

    def _write(
        self,
        index: int,
        word: int,
        step: int,
        gang: bool,  # noqa: FBT001 - a field of the page, private
        metrics: Mapping[str, float],
        window: Window | None,
        wanted: bool,  # noqa: FBT001 - private
    ) -> int:
        size = max((region.image_at + region.image_bytes for region in self._regions.values()), default=HEADER_BYTES)
        copier = self._copier(index, size)
        began = time.perf_counter()
        copier.slot.begin()
        copier.slot.want(word if wanted else 0)
        late = copier.copy(window)
        regions = tuple(
            PartRegion(
                name=region.name,
                tree_at=region.tree_at,
                tree_bytes=len(self._plans[region.name].tree),
                image_at=region.image_at,
                image_bytes=region.image_bytes,
            )
            for region in self._regions.values()
        )
        copier.slot.describe(
            SnapshotMeta(
                job_id=self._job_id,
                attempt=self._attempt,
                step=step,
                rank=self._rank,
                world_size=self._world_size,
                token=self._token,
                gang=gang,
                created_at=time.time(),
                metrics=metrics,
                parts=regions,
            )
        )
        if late is None or late.copied:
            copier.slot.commit(word)
            self.rehearsed = late
        else:
            self.rest, self._late_word = self._later(copier.slot, late, word), word
        self.copy_seconds = time.perf_counter() - began
        return sum(region.tree_bytes + region.image_bytes for region in regions)

    def _choose(self, on_wait: Callable[[], None] | None) -> int:
        """Choose a slot that may be overwritten: not the newest, not one that is held or must still reach storage.

        Prefers a used one to a new one. Waits where there is none and storage works.
        """
        began = time.perf_counter()
        while (index := self._free()) is None:
            if not self._store_state.takes_all:
                return self._given_up()
            if on_wait is not None:
                on_wait()
                on_wait = None
            time.sleep(_STORE_POLL_SECONDS)
            self.waited_seconds = time.perf_counter() - began
        return index

    def _free(self) -> int | None:
        identities = {index: slot.identity() for index, slot in self._slots.items()}
        wanted = self._leader.wanted()
        keep = self._in_use(identities) | {slot.pending(wanted) for slot in self._slots.values()}
        free = [index for index, found in identities.items() if found == 0 or found not in keep]
        if free:
            return min(free, key=lambda index: identities[index])
        return next((index for index in range(SLOTS) if index not in identities), None)

    def _in_use(self, identities: Mapping[int, int]) -> set[int]:
        return {max(identities.values(), default=0), held(list(identities.values()), self._hold.get())} - {0}

    def _given_up(self) -> int:
        """Return the slot of the oldest snapshot that must reach storage and cannot."""
        identities = {index: slot.identity() for index, slot in self._slots.items()}
        keep = self._in_use(identities)
        index = min((i for i, found in identities.items() if found not in keep), key=lambda i: identities[i])
        lost = version_of(identities[index])
        if self._store_state.serves and lost is not None:
            self.left_out.append(lost.step)
        return index

    def _copier(self, index: int, size: int) -> _Copier:
        copier = self._copiers.get(index)
        if copier is None:
            slot = self._slots.get(index)
            if slot is None or not size <= len(slot.memory) <= 2 * size:
                slot = SnapshotSlot.create(self._directory.slot_path(self._rank, index), size)
                self._slots[index] = slot
            slot.begin()
            copier = self._copiers[index] = _Copier(slot, self._regions, self._plans, self._threads, self._pool)
        return copier


def _complete(slot: SnapshotSlot, late: Late, word: int) -> LateCopy:
    began = time.thread_time()
    try:
        failure = (
            "" if late.copy() else "the state was changed while it was being copied, and not by an optimizer's step"
        )
    except Exception as error:  # no error here may end the training
        failure = f"the state could not be copied while training went on: {error}"
    if not failure:
        slot.commit(word)
    return LateCopy(failure=failure, seconds=time.thread_time() - began)


def _lay_out(plans: Mapping[str, PartPlan]) -> dict[str, PartRegion]:
    regions: dict[str, PartRegion] = {}
    at = HEADER_BYTES
    for name, plan in plans.items():
        tree_bytes = len(plan.tree) + len(plan.tree) // 4 + _TREE_SLACK
        image_at = _round_up(at + tree_bytes)
        image_bytes = len(plan.header) + plan.data_bytes
        regions[name] = PartRegion(
            name=name, tree_at=at, tree_bytes=tree_bytes, image_at=image_at, image_bytes=image_bytes
        )
        at = _round_up(image_at + image_bytes)
    return regions


def _round_up(value: int) -> int:
    return -(-value // _PAGE) * _PAGE
