"""A checkpoint directory: lists, verifies and reads its checkpoints, quarantines damaged ones, removes what is not kept.

Must not choose what to resume from.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.format import codec, layout, tensorfile
from orchestrator.checkpoint.format.layout import FileRecord, Manifest, Version
from orchestrator.checkpoint.format.sharded import join, pieces_of
from orchestrator.spec.plain_files import NotPlainFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from orchestrator.checkpoint.storage.storage import Storage

KEEP_BROKEN = 2  # quarantined checkpoints kept for inspection


class CheckpointStatus(StrEnum):
    """Whether a checkpoint counts."""

    COMPLETE = "complete"
    BROKEN = "broken"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One entry of a checkpoint directory. ``bytes`` is from its manifest; ``why`` explains a bad status."""

    name: str
    path: str
    step: int
    attempt: int
    status: CheckpointStatus
    why: str = ""
    bytes: int = 0
    created_at: float | None = None
    world_size: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    digest: str = ""  # of the content, where versions share a name

    @property
    def order(self) -> tuple[int, int]:
        """Sort key, highest for the newest checkpoint: a newer attempt takes precedence over a higher step."""
        return self.attempt, self.step

    @property
    def version(self) -> Version:
        """Attempt and step."""
        return Version(attempt=self.attempt, step=self.step)

    @property
    def is_complete(self) -> bool:
        """Whether it counts, as far as known without reading it."""
        return self.status is CheckpointStatus.COMPLETE


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Rule to keep the ``keep`` newest (None: all), and the ``keep_best`` best by ``score_attribute`` (``max`` or ``min``).

    ``keep_best`` None: as many as ``keep``.
    """

    keep: int | None = 3
    keep_best: int | None = None
    score_attribute: str | None = None
    score_order: str = "max"

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}: the last good checkpoint is never removed; use 1 or more")
        if self.keep_best is not None and self.keep_best < 1:
            raise ValueError(f"keep_best is {self.keep_best}; use 1 or more, or no score_attribute")
        if self.score_order not in ("max", "min"):
            raise ValueError(f"score_order is {self.score_order!r}; use 'max' or 'min'")

    @property
    def best_count(self) -> int | None:
        """Number of the best checkpoints that are kept; None: all."""
        return self.keep if self.keep_best is None else self.keep_best


def removable(infos: Sequence[CheckpointInfo], retention: Retention) -> tuple[CheckpointInfo, ...]:
    """Return the complete checkpoints to remove, oldest first. Never all of them."""
    complete = sorted((info for info in infos if info.status is CheckpointStatus.COMPLETE), key=lambda info: info.order)
    if retention.keep is None:
        return ()
    kept = {info.name for info in complete[-retention.keep :]}
    kept |= {info.name for info in best_infos(complete, retention)}
    return tuple(info for info in complete if info.name not in kept)


def best_by_score(infos: Sequence[CheckpointInfo], retention: Retention) -> CheckpointInfo | None:
    """Return the complete checkpoint with the best finite score; of equal ones the newest."""
    return next(iter(best_infos(infos, retention)), None)


def best_infos(infos: Sequence[CheckpointInfo], retention: Retention) -> tuple[CheckpointInfo, ...]:
    """Return the complete checkpoints with the best finite scores, the best first; of equal ones the newest."""
    if retention.score_attribute is None:
        return ()
    sign = 1.0 if retention.score_order == "max" else -1.0
    scored = [
        (sign * info.metrics[retention.score_attribute], info.order, info)
        for info in infos
        if info.status is CheckpointStatus.COMPLETE
        and math.isfinite(info.metrics.get(retention.score_attribute, math.nan))
    ]
    best = sorted(scored, key=lambda item: item[:2], reverse=True)
    count = retention.best_count
    return tuple(info for *_, info in (best if count is None else best[:count]))


def removable_broken(infos: Sequence[CheckpointInfo]) -> tuple[CheckpointInfo, ...]:
    """Return the quarantined checkpoints to remove."""
    broken = sorted(
        (info for info in infos if info.status is CheckpointStatus.BROKEN),
        key=lambda info: (info.order, info.name),
    )
    return tuple(broken[:-KEEP_BROKEN])


_LISTING_RETRIES = 20  # retries for a directory that changes during a listing
_MAX_BROKEN = 1000  # of one name


class CheckpointDirectory:
    """The entries of one storage. ``quarantined`` collects a sentence for each damaged checkpoint."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.quarantined: list[str] = []

    def candidates(self) -> Iterator[str]:
        """Yield committed names, newest first, listed again after each: other processes may prune or quarantine meanwhile."""
        tried: set[str] = set()
        for _ in range(_LISTING_RETRIES + len(self.storage.names())):
            found = (layout.parse_name(name) for name in self.storage.names())
            fresh = sorted(version for version in found if version is not None and version.name not in tried)
            if not fresh:
                return
            tried.add(fresh[-1].name)
            yield fresh[-1].name

    def infos(self) -> tuple[CheckpointInfo, ...]:
        """List all checkpoints, newest first: complete, broken (and why), incomplete. Reads manifests only."""
        infos = [info for name in self.storage.names() if (info := self._describe(name)) is not None]
        return tuple(sorted(infos, key=lambda info: (info.order, info.name), reverse=True))

    def verified(self, info: CheckpointInfo) -> CheckpointInfo:
        """Read a checkpoint completely; return its entry with the present status. Changes nothing."""
        if info.status is not CheckpointStatus.COMPLETE:
            return info
        reader = CheckpointReader(self.storage, info.name)
        try:
            known = reader.manifest()
            reader.verify(known)
        except CorruptCheckpointError as error:
            version = Version(attempt=info.attempt, step=info.step)
            return self._broken(info.name, version, CheckpointStatus.BROKEN, str(error))
        return reader.info(known)

    def quarantine(self, name: str, why: str) -> None:
        """Rename a damaged checkpoint to ``*.broken``, with a note of the reason. Never raises for storage errors."""
        with contextlib.suppress(OSError):  # read-only storage is still read
            if name not in self.storage.names():
                return  # pruned, or quarantined by another rank
            note = json.dumps({"checkpoint": name, "why": why, "at": time.time()})
            with contextlib.suppress(OSError):
                self.storage.write(f"{name}/{layout.QUARANTINE_NOTE}", [note.encode()])
            self._set_aside(name)
        self.quarantined.append(f"{name}: {why}")

    def retain(self, retention: Retention) -> tuple[str, ...]:
        """Remove the complete checkpoints that are not kept, and old broken ones; return the names of the complete ones."""
        infos = self.infos()
        gone = removable(infos, retention)
        kept = [info for info in infos if info.status is CheckpointStatus.COMPLETE and info not in gone]
        if gone and len(kept) == 1 and self.verified(kept[0]).status is not CheckpointStatus.COMPLETE:
            gone = ()  # the seemingly last valid one is damaged: keep the others
        for info in (*gone, *removable_broken(infos)):
            self.storage.discard(info.name)
        return tuple(info.name for info in gone)

    def clean(self, before: Version, token: str) -> None:
        """Remove what ended runs left: staging directories, agreements, half-deleted trees.

        Staging directories are removed when they are older than ``before``, or of its attempt but of another run.
        """
        for name in self.storage.names():
            if self._is_leftover(name, before, token):
                with contextlib.suppress(OSError):
                    self.storage.remove(name)

    def _is_leftover(self, name: str, before: Version, token: str) -> bool:
        staged = layout.parse_staging(name)
        if staged is not None:
            version, run = staged
            return version < before or (version.attempt == before.attempt and run != token)
        if layout.is_ticket(name):
            return not name.startswith(layout.ticket_prefix(before.attempt, token))
        return layout.is_removing(name)

    def _set_aside(self, name: str) -> None:
        for number in range(1, _MAX_BROKEN):
            try:
                self.storage.rename(name, layout.broken_name(name, number))
            except FileExistsError:
                continue
            return

    def _describe(self, name: str) -> CheckpointInfo | None:
        version = layout.parse_name(name)
        if version is not None:
            reader = CheckpointReader(self.storage, name)
            try:
                return reader.info(reader.manifest())
            except CorruptCheckpointError as error:
                return self._broken(name, version, CheckpointStatus.BROKEN, str(error))
        version = layout.parse_broken(name)
        if version is not None:
            return self._broken(name, version, CheckpointStatus.BROKEN, self._note(name))
        staged = layout.parse_staging(name)
        if staged is not None:
            return self._broken(name, staged[0], CheckpointStatus.INCOMPLETE, self._progress(name))
        return None

    def _broken(self, name: str, version: Version, status: CheckpointStatus, why: str) -> CheckpointInfo:
        return CheckpointInfo(
            name=name,
            path=self.storage.location(name),
            step=version.step,
            attempt=version.attempt,
            status=status,
            why=why,
        )

    def _note(self, name: str) -> str:
        try:
            return str(json.loads(bytes(self.storage.read(f"{name}/{layout.QUARANTINE_NOTE}")))["why"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "set aside; the note with the reason is missing"

    def _progress(self, name: str) -> str:
        done = sum(1 for entry in self.storage.names(name) if layout.is_done_marker(entry))
        return "being written, or its writer died" + (f"; {done} ranks had finished" if done else "")


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
        read = layout.parse_manifest(raw)
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
