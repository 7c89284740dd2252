"""Classifies SQLite's error codes."""

from __future__ import annotations

import sqlite3

# A limit or a quota on the file looks like a write error to SQLite; cause and remedy are the same.
_FULL_CODES = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_IOERR_FSYNC,
        sqlite3.SQLITE_IOERR_SHMSIZE,
        sqlite3.SQLITE_IOERR_TRUNCATE,
    }
)
_DAMAGE_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def is_disk_full(error: BaseException) -> bool:
    """Whether SQLite could not write for lack of space."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) in _FULL_CODES


def is_damage(error: BaseException) -> bool:
    """Whether SQLite found the file damaged."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.Error) and code is not None and (code & 0xFF) in _DAMAGE_CODES
