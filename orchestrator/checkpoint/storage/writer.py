"""Writes a checkpoint and commits it. Takes bytes, needs neither torch nor numpy: the rank actor uses it as well.

Files are written and fsynced in a staging directory, the manifest comes last, and one atomic rename gives the
checkpoint its name. When ranks store parts of their own, each writes a done marker after its part, and the rank that
sees all markers commits, under a lock. A kill at any moment leaves either a complete checkpoint or a staging directory
that is never read.

The fence keeps writers of older attempts out: the newest attempt writes its number into fence.json before it loads;
every save reads it, and the commit reads it again under the lock. Even where a share has no locks, an old attempt's
checkpoint does no harm: newer attempts sort first.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from orchestrator.checkpoint.errors import (
    CorruptCheckpointError,
    InsufficientSpaceError,
    OvertakenError,
    StaleAttemptError,
)
from orchestrator.checkpoint.format import layout
from orchestrator.checkpoint.format.layout import FileRecord, Manifest
from orchestrator.checkpoint.storage.directory import CheckpointReader
from orchestrator.checkpoint.storage.storage import except_on_full_disk
from orchestrator.units import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from orchestrator.checkpoint.format.layout import Version
    from orchestrator.checkpoint.storage.directory import CheckpointDirectory, CheckpointInfo
    from orchestrator.checkpoint.storage.storage import Storage

_MOST = 2**63


class Fence:
    """The fence of one directory, held for ``attempt``; None adopts the newest attempt seen.

    ``lease``: this process supervises the ranks of that newer attempt. It may still commit what the ended ranks of
    ``attempt`` left in memory.
    """

    def __init__(self, storage: Storage, attempt: int | None, lease: int = 0) -> None:
        self._storage = storage
        self.attempt = max(self.newest_seen(), 1) if attempt is None else attempt
        self.lease = max(lease, self.attempt)
        self._held = False

    def hold(self, *, announce: bool) -> bool:
        """Check the fence, and on the first call ``announce`` this attempt; return whether this was that call."""
        self.check(thorough=not self._held)
        first, self._held = not self._held, True
        if first and announce and self._value() < self.attempt:
            # On a full disk the checkpoints of older attempts still sort behind.
            with except_on_full_disk(), self._storage.lock():
                if self._value() < self.attempt:
                    self._storage.replace(layout.FENCE, json.dumps({"attempt": self.attempt}).encode())
        return first and announce

    def check(self, *, thorough: bool = False) -> None:
        """Raise StaleAttemptError when a newer attempt took over; ``thorough`` also reads the directory's names."""
        newest = self.newest_seen() if thorough else self._value()
        if newest > self.lease:
            raise StaleAttemptError(
                f"attempt {newest} has taken over {self._storage.location()}; this process belongs to attempt"
                f" {self.attempt} and must end"
            )

    def newest_seen(self) -> int:
        """Return the newest attempt that announced itself or left a checkpoint; 0 when there was none."""
        names = self._storage.names()
        seen = [found.attempt for name in names if (found := layout.parse_name(name) or layout.parse_broken(name))]
        return max(self._value(), *seen, 0)

    def _value(self) -> int:
        """Return the attempt of the fence; 0 where it is missing or damaged: newer attempts still sort first."""
        try:
            attempt = json.loads(bytes(self._storage.read(layout.FENCE)))["attempt"]
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return 0
        return attempt if type(attempt) is int and 0 <= attempt < _MOST else 0


_SPACE_SLACK_BYTES = 1024 * 1024  # manifest and directories beside the parts


class Part(Protocol):
    """One part of a checkpoint (the shared state, or a rank's own), ready to be written."""

    @property
    def total_bytes(self) -> int:
        """Return the approximate size of the part on storage, in bytes."""
        ...

    def tree_file(self) -> Iterable[bytes | memoryview]:
        """Yield the JSON tree, piece by piece; the next piece may overwrite the memory of the last."""
        ...

    def tensor_file(self) -> Iterator[bytes | memoryview] | None:
        """Yield the content of its tensor file in the same way; None when it has no tensors."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One rank's contribution to the checkpoint of ``version``.

    ``gang``: every rank contributes a part. ``still_valid`` is called after the parts were read: False means that they
    changed meanwhile and are not used.
    """

    version: Version
    parts: Mapping[str, Part]
    gang: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    still_valid: Callable[[], bool] = lambda: True


class CheckpointWriter:
    """Writes one rank's contributions into a directory, and commits when it is the last of its gang."""

    def __init__(
        self, directory: CheckpointDirectory, fence: Fence, *, rank: int, world_size: int, job_id: str, token: str
    ) -> None:
        self._directory, self._fence = directory, fence
        self._storage = directory.storage
        self._rank, self._world_size, self._job_id, self._token = rank, world_size, job_id, token

    def write(self, draft: Draft) -> CheckpointInfo | None:
        """Store the contribution; return the checkpoint if that completed it, None while others are missing.

        A version that is already committed is left unchanged. Raises OSError, InsufficientSpaceError, OvertakenError or
        StaleAttemptError, and then leaves nothing behind that takes space; earlier checkpoints are never touched.
        """
        committed = self._committed(draft.version)
        if committed is not None:
            return committed
        self._check_space(draft)
        staging = layout.staging_name(draft.version, self._token)
        try:
            files = self._write_parts(staging, draft)
            if draft.gang:
                marker = json.dumps(layout.render_files(files)).encode()
                # Atomic, because another rank that sees the name reads it at once. Only the manifest must be durable.
                self._storage.replace(f"{staging}/{layout.done_marker(self._rank)}", marker)
                return self._commit_gang(staging, draft)
            return self._commit(staging, draft, files, ranks=())
        except (OSError, OvertakenError):
            self._abandon(staging, draft)
            with contextlib.suppress(OSError):
                self._fence.check()  # a newer attempt removes incomplete ones of older attempts: report that
            raise

    def _committed(self, version: Version) -> CheckpointInfo | None:
        if version.name not in self._storage.names():
            return None
        reader = CheckpointReader(self._storage, version.name)
        try:
            return reader.info(reader.manifest())
        except CorruptCheckpointError as error:
            self._directory.quarantine(version.name, str(error))
            return None

    def _check_space(self, draft: Draft) -> None:
        needed = _SPACE_SLACK_BYTES + sum(part.total_bytes for part in draft.parts.values())
        free = self._storage.free_bytes()
        if free is None or free >= needed:
            return
        if self._rank == 0:  # earlier incomplete ones can never be completed once ranks have reached this step
            self._directory.clean(draft.version, self._token)
            free = self._storage.free_bytes()
        if free is not None and free < needed:
            raise InsufficientSpaceError(
                f"{self._storage.location()} has {size(free)} free, the checkpoint needs {size(needed)};"
                " free some space or lower checkpoint.keep"
            )

    def _write_parts(self, staging: str, draft: Draft) -> dict[str, FileRecord]:
        files: dict[str, FileRecord] = {}
        for part, content in draft.parts.items():
            name = layout.tree_file(part)
            files[name] = self._storage.write(f"{staging}/{name}", content.tree_file())
            chunks = content.tensor_file()
            if chunks is not None:
                name = layout.tensor_file(part)
                files[name] = self._storage.write(f"{staging}/{name}", chunks)
        if not draft.still_valid():
            raise OvertakenError(f"the snapshot of step {draft.version.step} was overwritten while it was stored")
        return files

    def _commit_gang(self, staging: str, draft: Draft) -> CheckpointInfo | None:
        markers = [layout.done_marker(rank) for rank in range(self._world_size)]
        if not set(self._storage.names(staging)).issuperset(markers):
            return None
        files: dict[str, FileRecord] = {}
        try:
            for marker in markers:
                raw = self._storage.read(f"{staging}/{marker}")
                files.update(layout.parse_files(json.loads(bytes(raw))))
        except FileNotFoundError:  # another rank commits or has committed
            return None
        return self._commit(staging, draft, files, ranks=tuple(range(self._world_size)))

    def _commit(
        self, staging: str, draft: Draft, files: Mapping[str, FileRecord], ranks: tuple[int, ...]
    ) -> CheckpointInfo | None:
        version = draft.version
        made = Manifest(
            step=version.step,
            attempt=version.attempt,
            job_id=self._job_id,
            world_size=self._world_size,
            created_at=time.time(),
            ranks=ranks,
            metrics=dict(draft.metrics),
            files=dict(files),
        )
        with self._storage.lock():
            self._fence.check()
            if version.name in self._storage.names():
                return self._committed(version)
            for name in self._storage.names(staging):
                if name not in files:  # done markers, and files of a failed save of this step
                    self._storage.remove(f"{staging}/{name}")
            self._storage.write(f"{staging}/{layout.MANIFEST}", [layout.render_manifest(made)])
            self._storage.sync(staging)
            with contextlib.suppress(FileExistsError):  # without a working lock another rank may have been faster
                self._storage.rename(staging, version.name)
        return CheckpointReader(self._storage, version.name).info(made)

    def _abandon(self, staging: str, draft: Draft) -> None:
        with contextlib.suppress(OSError):
            if not draft.gang:
                self._storage.remove(staging)
                return
            for part in draft.parts:
                self._storage.remove(f"{staging}/{layout.tensor_file(part)}")
                self._storage.remove(f"{staging}/{layout.tree_file(part)}")
