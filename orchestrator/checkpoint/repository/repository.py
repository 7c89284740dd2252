"""The repository of one job's checkpoints, as one rank of one attempt sees it: save, load, list, verify, retain.

Guarantees (docs/checkpoints.md): a checkpoint counts only when it is complete; a damaged one is never loaded, and the
newest valid one is found; the last valid one is never removed; a writer of an older attempt is refused.

Ranks do not communicate: they share only the storage. The first one that has chosen what to resume from leaves a note
in the checkpoint directory, or beside the snapshots where the disk is full, and the others follow it; so they agree even when a checkpoint is found damaged, or becomes
complete, between their reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import CorruptCheckpointError, ResumeMismatchError
from orchestrator.checkpoint.format import codec, layout, sharded
from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.snapshots.file import MEMORY
from orchestrator.checkpoint.storage.directory import (
    Checkpoint,
    CheckpointDirectory,
    CheckpointInfo,
    CheckpointReader,
    Retention,
)
from orchestrator.checkpoint.storage.storage import FULL, LocalStorage, Storage, open_storage
from orchestrator.checkpoint.storage.writer import CheckpointWriter, Draft, Fence, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestrator.checkpoint.snapshots.file import SnapshotReader

WAIT_SECONDS = 300.0  # rank 0 may have much to verify
_POLL_SECONDS = 0.05
_FROM_MEMORY = f"{MEMORY}:"
_NOTHING = ""


class Resume:
    """Finds the checkpoint from which one rank starts. ``token`` None: the rank decides alone."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        snapshots: SnapshotReader | None,
        *,
        rank: int,
        world_size: int,
        attempt: int,
        token: str | None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._wait_seconds = wait_seconds
        self._directory, self._snapshots = directory, snapshots
        self._storage = directory.storage
        self._places: list[Storage] = [self._storage]
        if snapshots is not None:  # in memory there is space where the disk has none
            self._places.append(LocalStorage(snapshots.path, private=True))
        self._rank, self._world_size = rank, world_size
        self._attempt, self._token = attempt, token
        self._loads = 0
        self._into: Any = None

    def load(self, into: Any = None) -> Checkpoint | None:
        """Return the checkpoint to start from, None when there is none. See CheckpointRepository.load_latest for errors."""
        self._into = into
        if self._world_size == 1 or self._token is None:
            return self._decide()
        ticket = layout.ticket_name(self._attempt, self._token, self._loads)
        self._loads += 1
        agreed = self._read(ticket)
        if agreed is None and self._rank != 0 and not self._storage.atomic_create:
            agreed = self._wait_for(ticket)  # where two ranks could create the note at once, only rank 0 does
        if agreed is not None:
            return self._follow(agreed)
        loaded = self._decide()
        choice = _choice(loaded)
        self._leave(ticket, json.dumps({"checkpoint": choice}).encode())
        agreed = self._read(ticket) or _NOTHING
        return loaded if agreed == choice else self._follow(agreed)

    def _leave(self, ticket: str, note: bytes) -> None:
        """Leave the note in storage, where every rank finds it, or in memory where the disk is full; one that is there stays."""
        try:
            self._storage.create(ticket, note)
        except OSError as error:
            if error.errno not in FULL or len(self._places) == 1:
                raise
            self._places[1].create(ticket, note)

    def _decide(self) -> Checkpoint | None:
        in_memory = None if self._snapshots is None else self._snapshots.newest()
        for name in self._directory.candidates():
            version = layout.parse_name(name)
            if in_memory is not None and version is not None and version <= in_memory:
                break  # a copy in memory is faster than a file, which must be verified
            try:
                return CheckpointReader(self._storage, name).load(
                    self._rank, self._world_size, verify_all=True, into=self._into
                )
            except CorruptCheckpointError as error:
                self._directory.quarantine(name, str(error))
        if in_memory is None or self._snapshots is None:
            return None
        try:
            return self._snapshots.load(in_memory, self._rank, self._world_size, self._into)
        except CorruptCheckpointError as error:
            self._directory.quarantined.append(f"snapshot of step {in_memory.step}: {error}")
            self._snapshots = None
            return self._decide()

    def _follow(self, choice: str) -> Checkpoint | None:
        if choice == _NOTHING:
            return None
        try:
            if choice.startswith(_FROM_MEMORY):
                return self._from_memory(choice.removeprefix(_FROM_MEMORY))
            return CheckpointReader(self._storage, choice).load(
                self._rank, self._world_size, verify_all=False, into=self._into
            )
        except CorruptCheckpointError as error:
            if not choice.startswith(_FROM_MEMORY):
                self._directory.quarantine(choice, str(error))
            raise ResumeMismatchError(
                f"rank {self._rank} cannot load {choice}, which the other ranks resume from ({error});"
                " restart the attempt: the checkpoint before it will be used"
            ) from error

    def _from_memory(self, name: str) -> Checkpoint:
        version = layout.parse_name(name)
        if self._snapshots is None or version is None:
            raise CorruptCheckpointError("this rank has no access to the snapshots of the others")
        return self._snapshots.load(version, self._rank, self._world_size, self._into)

    def _wait_for(self, ticket: str) -> str:
        deadline = time.monotonic() + self._wait_seconds
        while (agreed := self._read(ticket)) is None:
            if time.monotonic() >= deadline:
                raise ResumeMismatchError(
                    f"rank {self._rank} waited {self._wait_seconds:.0f} s for rank 0 to choose a checkpoint;"
                    " every rank must call load()"
                )
            time.sleep(_POLL_SECONDS)
        return agreed

    def _read(self, ticket: str) -> str | None:
        """Return the choice of the note, None without one.

        Raises ResumeMismatchError where two ranks have left different ones, because the disk was full for one of them only: each reads both
        places after it has left its own, so at least one of them notices.
        """
        found: set[str] = set()
        for place in self._places:
            with contextlib.suppress(FileNotFoundError):
                found.add(str(json.loads(bytes(place.read(ticket)))["checkpoint"]))
        if len(found) > 1:
            raise ResumeMismatchError(
                f"the ranks have chosen different checkpoints ({' and '.join(sorted(found))}), because the disk was full for some of them;"
                " restart the attempt: they choose again"
            )
        return found.pop() if found else None


def _choice(loaded: Checkpoint | None) -> str:
    if loaded is None:
        return _NOTHING
    name = Version(attempt=loaded.attempt, step=loaded.step).name
    return f"{_FROM_MEMORY}{name}" if loaded.path == MEMORY else name


_SHARED_TOKEN = "shared"  # noqa: S105  (no secret: names the staging directory of runs without a token)


class CheckpointRepository:
    """The checkpoints of one job.

    ``root`` is a directory that every rank sees, a URL (``s3://...``), or a Storage. ``attempt`` fences out older ones,
    None adopts the newest seen, for runs without attempt numbers. ``token`` identifies a run within an attempt: equal
    on all ranks, None where that cannot be ensured (then each rank verifies everything and decides alone what to load).
    ``snapshots`` are also searched when loading. ``environ``: see open_storage; ``lease``: see Fence.
    Not thread-safe; the caller serialises.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        *,
        attempt: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        keep: int | None = 3,
        keep_best: int | None = None,
        score_attribute: str | None = None,
        score_order: str = "max",
        job_id: str = "",
        token: str | None = None,
        snapshots: SnapshotReader | None = None,
        environ: Mapping[str, str] | None = None,
        lease: int = 0,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}; check RANK and WORLD_SIZE")
        self.storage: Storage = open_storage(root, environ) if isinstance(root, str | os.PathLike) else root
        self.rank, self.world_size = rank, world_size
        self.retention = Retention(
            keep=keep, keep_best=keep_best, score_attribute=score_attribute, score_order=score_order
        )
        self._run = token or _SHARED_TOKEN
        self._directory = CheckpointDirectory(self.storage)
        self._fence = Fence(self.storage, attempt, lease)
        self._writer = CheckpointWriter(
            self._directory, self._fence, rank=rank, world_size=world_size, job_id=job_id, token=self._run
        )
        self._resume = Resume(
            self._directory,
            snapshots,
            rank=rank,
            world_size=world_size,
            attempt=self._fence.attempt,
            token=token,
            wait_seconds=wait_seconds,
        )

    @property
    def attempt(self) -> int:
        """The attempt that this repository writes as."""
        return self._fence.attempt

    @property
    def quarantined(self) -> tuple[str, ...]:
        """A sentence for each checkpoint that this repository found damaged and quarantined."""
        return tuple(self._directory.quarantined)

    def save(
        self, state: Any, *, step: int, rank_state: Any = None, metrics: Mapping[str, float] | None = None
    ) -> CheckpointInfo | None:
        """Store a checkpoint of ``step``; return it once it is complete, None while parts of other ranks are missing.

        ``state`` is stored by rank 0 and ignored elsewhere, except for its DTensors: every rank stores its own pieces,
        so every rank passes them. ``rank_state`` is each rank's own: when used, every rank passes it. A step that this
        attempt has already stored is left unchanged. Raises OSError or InsufficientSpaceError when the storage fails
        (earlier checkpoints are untouched), StaleAttemptError when a newer attempt has taken over,
        UnsupportedStateError for a state that cannot be stored.
        """
        states, gang = sharded.parts_of(state, rank_state, self.rank)
        if not states:
            return None
        return self.save_states(states, step=step, gang=gang, metrics=metrics)

    def save_states(
        self, states: Mapping[str, Any], *, step: int, gang: bool, metrics: Mapping[str, float] | None = None
    ) -> CheckpointInfo | None:
        """Store a checkpoint as ``save`` does, from the states of its parts by name (see sharded.parts_of)."""
        parts = {name: codec.encode(part) for name, part in states.items()}
        return self.save_parts(parts, step=step, gang=gang, metrics=metrics)

    def save_parts(
        self,
        parts: Mapping[str, Part],
        *,
        step: int,
        gang: bool,
        metrics: Mapping[str, float] | None = None,
        still_valid: Callable[[], bool] = lambda: True,
    ) -> CheckpointInfo | None:
        """Store a checkpoint as ``save`` does, from encoded parts. ``gang``: every rank contributes.

        ``still_valid`` is called once the parts were read; when it returns False, OvertakenError is raised.
        """
        self.hold_fence()
        version = Version(attempt=self.attempt, step=step)
        draft = Draft(version=version, parts=parts, gang=gang, metrics=metrics or {}, still_valid=still_valid)
        info = self._writer.write(draft)
        if info is not None:
            with contextlib.suppress(OSError):  # the next save retries the removal
                self._directory.retain(self.retention)
                if self._fence.lease == self.attempt:  # a newer attempt's work in progress must stay
                    self._directory.clean(version, self._run)
        return info

    def hold_fence(self) -> None:
        """Announce this attempt, so that older ones are refused; StaleAttemptError when this one is older."""
        if self._fence.hold(announce=self.rank == 0) and self._fence.lease == self.attempt:
            self._directory.clean(Version(attempt=self.attempt, step=0), self._run)

    def load_latest(self, into: Any = None) -> Checkpoint | None:
        """Load the newest valid checkpoint from memory or storage, None when there is none; quarantine damaged ones.

        ``into``: a state whose DTensors are filled in place, see sharded.join; without it they are whole, on the CPU.
        All ranks of a run get the same one: the first to decide leaves a note that the others follow. Raises
        ResumeMismatchError when this rank cannot read what they agreed on, OSError when the storage is out of reach.
        """
        self.hold_fence()
        return self._resume.load(into)

    def load_path(self, path: str, into: Any = None) -> Checkpoint:
        """Load one named checkpoint, by path or URL, of this job or of another.

        Raises CorruptCheckpointError when it is damaged or no checkpoint: a named checkpoint has no substitute.
        """
        folder, _, name = path.rstrip("/").rpartition("/")
        try:
            reader = CheckpointReader(open_storage(folder or "."), name)
            return reader.load(self.rank, self.world_size, verify_all=True, into=into)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"cannot resume from {path}: {error}; name another checkpoint") from error

    def latest_good(self) -> CheckpointInfo | None:
        """Return the newest checkpoint that verifies; quarantine damaged ones on the way."""
        for name in self._directory.candidates():
            reader = CheckpointReader(self.storage, name)
            try:
                known = reader.manifest()
                reader.verify(known)
            except CorruptCheckpointError as error:
                self._directory.quarantine(name, str(error))
            else:
                return reader.info(known)
        return None

    def list(self) -> tuple[CheckpointInfo, ...]:
        """List all checkpoints, newest first: complete, broken (and why), incomplete. Reads manifests only."""
        return self._directory.infos()

    def verify(self, info: CheckpointInfo) -> CheckpointInfo:
        """Read a checkpoint completely; return its entry with the present status. Changes nothing."""
        return self._directory.verified(info)

    def retain(self) -> tuple[str, ...]:
        """Remove the checkpoints that retention does not keep; return the names of the removed complete checkpoints."""
        return self._directory.retain(self.retention)
