"""Reads one committed checkpoint directory: verifies and decodes it. The choice of the checkpoint is made elsewhere."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.format import codec, layout, manifest, tensorfile
from orchestrator.checkpoint.format.manifest import FileRecord, Manifest
from orchestrator.checkpoint.format.sharded import join, pieces_of
from orchestrator.checkpoint.storage.info import CheckpointInfo, CheckpointStatus
from orchestrator.spec.plain_files import NotPlainFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from orchestrator.checkpoint.storage.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint.

    ``state`` is the replicated state; ``rank_state`` is this rank's part, or None when it stored none or the
    number of ranks has changed (``rank_states(n)`` reads any rank's part). ``path`` is the directory or URL, or
    ``memory`` for a snapshot. Tensors are on the CPU.
    """

    state: Any
    rank_state: Any
    step: int
    attempt: int
    metrics: Mapping[str, float]
    path: str
    world_size: int
    bytes: int
    read_rank_state: Callable[[int], Any] = field(repr=False, compare=False)

    def rank_states(self, rank: int) -> Any:
        """Return the part that ``rank`` of the saving run stored, None when there is none."""
        return self.read_rank_state(rank)


class CheckpointReader:
    """One committed checkpoint directory called ``name`` in ``storage``."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self.name = name

    def manifest(self) -> Manifest:
        """Read and check the manifest, and that the directory holds exactly what it lists."""
        with _damage(layout.MANIFEST):
            raw = self._storage.read(f"{self.name}/{layout.MANIFEST}")
        read = manifest.parse(raw)
        version = layout.parse_name(self.name)
        if version is None or (version.step, version.attempt) != (read.step, read.attempt):
            raise CorruptCheckpointError(f"manifest is that of step {read.step}, attempt {read.attempt}")
        present = {name for name in self._storage.names(self.name) if not name.startswith(".nfs")}
        expected = {layout.MANIFEST, *read.files}
        if missing := sorted(expected - present):
            raise CorruptCheckpointError(f"{missing[0]} is missing")
        if extra := sorted(present - expected):
            raise CorruptCheckpointError(f"{extra[0]} does not belong to it")
        return read

    def verify(self, known: Manifest, skip: Iterable[str] = ()) -> None:
        """Read every file, except those in ``skip``, and compare it with the manifest. Raises CorruptCheckpointError."""
        for name in sorted(set(known.files) - set(skip)):
            with _damage(name):
                found = self._storage.digest(f"{self.name}/{name}")
            _compare(name, found, known.files[name])

    def load(self, rank: int, world_size: int, *, verify_all: bool, into: Any = None) -> Checkpoint:
        """Read, verify and decode in one pass. ``verify_all`` also reads the other ranks' parts.

        Raises CorruptCheckpointError when anything differs from the manifest.
        """
        known = self.manifest()
        same_ranks = world_size == known.world_size
        mine = layout.rank_part(rank)
        wanted = [layout.STATE, *([mine] if same_ranks and layout.tree_file(mine) in known.files else [])]
        parts = {part: self._part(part, known) for part in wanted}
        if verify_all:
            self.verify(
                known, skip=[file for part in wanted for file in (layout.tree_file(part), layout.tensor_file(part))]
            )
        return Checkpoint(
            state=join(parts[layout.STATE], lambda: self._pieces(known), into),
            rank_state=parts.get(mine),
            step=known.step,
            attempt=known.attempt,
            metrics=known.metrics,
            path=self._storage.location(self.name),
            world_size=known.world_size,
            bytes=known.total_bytes,
            read_rank_state=lambda other: self._rank_state(other, known),
        )

    def info(self, known: Manifest) -> CheckpointInfo:
        """Return the listing entry of a checkpoint whose manifest is valid."""
        return CheckpointInfo(
            name=self.name,
            path=self._storage.location(self.name),
            step=known.step,
            attempt=known.attempt,
            status=CheckpointStatus.COMPLETE,
            bytes=known.total_bytes,
            created_at=known.created_at,
            world_size=known.world_size,
            metrics=known.metrics,
        )

    def _rank_state(self, rank: int, known: Manifest) -> Any:
        part = layout.rank_part(rank)
        return self._part(part, known) if layout.tree_file(part) in known.files else None

    def _pieces(self, known: Manifest) -> Iterator[Mapping[str, Any]]:
        for rank in known.ranks:
            yield from pieces_of(self._part(layout.shard_part(rank), known))

    def _part(self, part: str, known: Manifest) -> Any:
        try:
            tree = json.loads(bytes(self._file(layout.tree_file(part), known)))
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"{layout.tree_file(part)} is not JSON: {error}") from error
        name = layout.tensor_file(part)
        if name not in known.files:
            return codec.decode(tree, (), memoryview(b""))
        entries, data = tensorfile.parse(self._file(name, known))
        return codec.decode(tree, entries, data)

    def _file(self, name: str, known: Manifest) -> memoryview:
        if name not in known.files:
            raise CorruptCheckpointError(f"{name} is not in the manifest")
        with _damage(name):
            raw = self._storage.read(f"{self.name}/{name}", known.files[name].bytes)
        _compare(name, FileRecord(bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest()), known.files[name])
        return raw


@contextlib.contextmanager
def _damage(name: str) -> Iterator[None]:
    """Turn errors that prove a damaged file into CorruptCheckpointError.

    Other errors (permission, an unavailable share) are no evidence of damage, and must not quarantine it.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotPlainFileError) as error:
        too_large = error.errno == errno.EFBIG
        raise CorruptCheckpointError(f"{name}: {error.strerror}" if too_large else f"{name} is missing") from error
    except OSError as error:
        if error.errno not in (errno.EIO, errno.ELOOP):
            raise
        raise CorruptCheckpointError(f"{name} cannot be read: {error.strerror}") from error


def _compare(name: str, found: FileRecord, expected: FileRecord) -> None:
    if found.bytes != expected.bytes:
        raise CorruptCheckpointError(f"{name} has {found.bytes} bytes instead of {expected.bytes}")
    if found.sha256 != expected.sha256:
        raise CorruptCheckpointError(f"{name} was changed: its SHA-256 differs from the manifest")
