"""Chooses the checkpoint that a run resumes from: the newest in memory and storage, the same on every rank.

Ranks do not communicate here. The first one that has decided leaves a note in the checkpoint directory, and the others
follow it; so they agree even when a checkpoint is found damaged, or becomes complete, between their reads.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import CorruptCheckpointError, ResumeMismatchError
from orchestrator.checkpoint.format import layout
from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.snapshots.reader import MEMORY
from orchestrator.checkpoint.storage.reader import Checkpoint, CheckpointReader

if TYPE_CHECKING:
    from orchestrator.checkpoint.snapshots.reader import SnapshotReader
    from orchestrator.checkpoint.storage.directory import CheckpointDirectory

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
        if self._storage.create(ticket, json.dumps({"checkpoint": choice}).encode()):
            return loaded
        agreed = self._read(ticket) or _NOTHING
        return loaded if agreed == choice else self._follow(agreed)

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
        try:
            return str(json.loads(bytes(self._storage.read(ticket)))["checkpoint"])
        except FileNotFoundError:
            return None


def _choice(loaded: Checkpoint | None) -> str:
    if loaded is None:
        return _NOTHING
    name = Version(attempt=loaded.attempt, step=loaded.step).name
    return f"{_FROM_MEMORY}{name}" if loaded.path == MEMORY else name
