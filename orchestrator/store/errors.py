"""Errors of the store. A docstring says what happened and what to do next; the message does so for the case."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from orchestrator.store.records import DiskTrouble

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from orchestrator.store.records import DamagedRecord


class StoreError(Exception):
    """The store could not do what was requested; the message gives the reason. Acknowledged writes are never lost."""


class StoreInUseError(StoreError):
    """Another daemon holds this store. Stop it with `orch down`, or use another ORCH_HOME."""

    def __init__(self, path: Path, pid: int | None) -> None:
        self.path, self.pid = path, pid
        holder = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"{path} is held by {holder}: stop that daemon (`orch down`) or choose another ORCH_HOME")


class StoreTooNewError(StoreError):
    """A newer version of orch wrote this store; nothing was changed. Install that version, or use another ORCH_HOME."""

    def __init__(self, path: Path, found: int, known: int) -> None:
        self.path, self.found, self.known = path, found, known
        super().__init__(
            f"{path} has schema version {found}, this orch knows up to {known}: install the version that wrote it, or "
            "choose another ORCH_HOME; nothing was changed"
        )


class StoreUnreadableError(StoreError):
    """The store's file is damaged or not a store; nothing was overwritten. Move it away or restore a backup."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(
            f"{path} cannot be read as a store ({reason}): restore a backup of it, or move {path.name}* away to begin "
            "with an empty store; nothing was overwritten"
        )


class StoreClosedError(StoreError):
    """The store was closed during a request. Open it again; acknowledged writes are there."""


class DiskError(StoreError):
    """The disk under the store takes nothing; nothing of the request was stored. ``trouble`` is the reason; remove it and try again."""

    def __init__(self, path: Path, what: str, trouble: DiskTrouble = DiskTrouble.FULL) -> None:
        self.path, self.trouble = path, trouble
        super().__init__(
            f"{disk_sentence(trouble, path.parent)}, {what}: {disk_remedy(trouble, path.parent)}, then try again"
        )


class DiskFullError(DiskError):
    """The disk under the store is full, or has no inodes; nothing of the request was stored. Free space and try again."""


class DiskFailedError(DiskError):
    """The disk under the store fails, or is read-only; nothing of the request was stored. Repair it and try again."""


def refused_by_disk(path: Path, what: str, trouble: DiskTrouble) -> DiskError:
    """Return the error for a request that the disk did not take."""
    full = trouble in (DiskTrouble.FULL, DiskTrouble.NO_INODES)
    return (DiskFullError if full else DiskFailedError)(path, what, trouble)


class OutcomeUnknownError(StoreError):
    """The disk failed while a request was stored: it may be stored or not. Repair the disk, start again, and look."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"the disk under {path.parent} failed while this was stored, and may or may not have kept it:"
            f" {disk_remedy(DiskTrouble.FAILING, path.parent)}, then `orch down`, `orch up`, and see with `orch status`"
        )


def damaged_sentence(record: DamagedRecord) -> str:
    """Return what is wrong with a job's record, and what follows."""
    if record.rebuilt:
        return (
            f"the record of job {record.job_id} is damaged, and is read from its events instead; nothing of it is lost"
        )
    return record.reason


def disk_sentence(trouble: DiskTrouble, home: Path) -> str:
    """Return what is wrong with the disk under the home."""
    match trouble:
        case DiskTrouble.FULL:
            return f"the disk under {home} is full"
        case DiskTrouble.NO_INODES:
            return f"the disk under {home} has no inodes left for new files (`df -i {home}`)"
        case DiskTrouble.FAILING:
            return f"the disk under {home} fails with input/output errors"
        case DiskTrouble.READ_ONLY:
            return f"the file system of {home} is mounted read-only"


def disk_remedy(trouble: DiskTrouble, home: Path) -> str:
    """Return what to do about it."""
    match trouble:
        case DiskTrouble.FULL:
            return "free space (`orch prune` removes old jobs)"
        case DiskTrouble.NO_INODES:
            return "remove files (`orch prune` removes those of old jobs)"
        case DiskTrouble.FAILING:
            return "find the reason in the kernel's log (`dmesg`) and repair or replace the disk"
        case DiskTrouble.READ_ONLY:
            return f"find the reason in the kernel's log (`dmesg`), then mount it writable (mount -o remount,rw `findmnt -nT {home} -o TARGET`)"


class JobNotFoundError(StoreError):
    """No job has this id, prefix or name. `orch status` lists the jobs."""

    def __init__(self, reference: str) -> None:
        self.reference = reference
        super().__init__(f"no job has the id, prefix or name {reference!r}: `orch status` lists the jobs")


class AmbiguousJobError(StoreError):
    """A prefix fits several jobs. Give more letters of the id."""

    def __init__(self, reference: str, candidates: Sequence[str]) -> None:
        self.reference, self.candidates = reference, tuple(candidates)
        shown = ", ".join(self.candidates[:5]) + (", …" if len(self.candidates) > 5 else "")
        super().__init__(f"{reference!r} fits several jobs ({shown}): give more letters of the id")


class NamedByOthersError(JobNotFoundError):
    """Only other users have a job or a matrix of this name. Name it with its user, or by its id."""

    def __init__(self, reference: str, candidates: Sequence[tuple[str, str]]) -> None:
        super().__init__(reference)
        self.candidates = tuple((f"{user}/{reference}", job_id) for user, job_id in candidates)
        shown = " or ".join(f"{name} ({job_id})" for name, job_id in self.candidates[:5])
        self.args = (f"you have no job {reference!r}: write {shown}",)


class JobExistsError(StoreError):
    """The new job's id is taken; nothing was stored. Generate another id and submit again."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        super().__init__(f"the id {job_id} is taken: generate another one and submit again")


class IdempotencyConflictError(StoreError):
    """An idempotency key was reused for a different job; nothing was stored. Use a new key for a new job."""

    def __init__(self, key: str, job_id: str) -> None:
        self.key, self.job_id = key, job_id
        super().__init__(f"the key {key!r} already belongs to job {job_id}, which differs: use a new key for a new job")


class VersionConflictError(StoreError):
    """A row is not at the version that was read: another process wrote the file. Stop every daemon, run `orch doctor`."""

    def __init__(self, job_id: str, version: int) -> None:
        self.job_id, self.version = job_id, version
        super().__init__(
            f"job {job_id} is no longer at version {version}: another program writes this store; stop it, then run "
            "`orch doctor`"
        )


class BrokenChainError(StoreError):
    """Changes of a job do not follow one another: a fault of orch. Nothing was stored; restart the daemon and report it."""

    def __init__(self, job_id: str, version: int) -> None:
        self.job_id, self.version = job_id, version
        super().__init__(
            f"a change of job {job_id} does not follow from version {version}: restart the daemon, and report it"
        )


class UnreadableRecordError(StoreError):
    """A job's record is damaged. The other jobs are not affected; a backup may hold the record."""

    def __init__(self, job_id: str, reason: str) -> None:
        self.job_id = job_id
        super().__init__(
            f"the record of job {job_id} is damaged ({reason}), and is set aside: restore a backup of the store to have it back"
        )


class BackupExistsError(StoreError):
    """The target of a backup or a restore already exists; it was not changed. Name a path that does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"{path} exists and was left alone: name a path that does not exist, or move it away")


# A limit or a quota on the file looks like a write error to SQLite, as does a disk that fails: `Disk.trouble` finds out which.
_REFUSED_CODES = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_IOERR_FSYNC,
        sqlite3.SQLITE_IOERR_SHMSIZE,
        sqlite3.SQLITE_IOERR_TRUNCATE,
    }
)
_DAMAGE_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def is_refused_by_disk(error: BaseException) -> bool:
    """Whether the disk did not take what SQLite wrote: mostly for lack of space."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) in _REFUSED_CODES


def is_cut_short(error: BaseException) -> bool:
    """Whether a commit failed while it was written, so that its end, without which it is void, is not in the log."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.Error) and code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)


def is_damage(error: BaseException) -> bool:
    """Whether SQLite found the file damaged."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.Error) and code is not None and (code & 0xFF) in _DAMAGE_CODES
