"""Classifies SQLite's error codes."""

from __future__ import annotations

import sqlite3

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
