"""Backups of the store: written while it is in use, checked and restored while it is not."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import TYPE_CHECKING

from orchestrator.durable_files import sync_directory, sync_tree
from orchestrator.store import verification
from orchestrator.store.disk import trouble_of
from orchestrator.store.errors import (
    BackupExistsError,
    StoreError,
    StoreUnreadableError,
    is_refused_by_disk,
    refused_by_disk,
)
from orchestrator.store.lock import StoreLock
from orchestrator.store.records import DiskTrouble
from orchestrator.store.sql.schema import check, connect, known_migrations

if TYPE_CHECKING:
    from pathlib import Path


def write(source: sqlite3.Connection, target: Path) -> None:
    """Copy the store behind ``source`` to ``target``, atomically, while other threads write.

    Raises BackupExistsError and DiskFullError.
    """
    if target.exists():
        raise BackupExistsError(target)
    draft = target.with_name(target.name + ".new")
    try:
        draft.unlink(missing_ok=True)
        _copy(source, draft)
    except (sqlite3.Error, OSError) as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        if is_refused_by_disk(error) or trouble_of(error, target.parent):
            trouble = trouble_of(error, target.parent) or DiskTrouble.FULL
            raise refused_by_disk(target, "so there is no backup", trouble) from error
        raise StoreError(
            f"no backup was written to {target} ({error}): choose a directory that can be written"
        ) from error
    draft.replace(target)
    sync_directory(target.parent)


def check_backup(backup: Path) -> list[str]:
    """Return the errors found in a backup, one sentence each; the backup is not changed.

    Raises StoreUnreadableError and StoreTooNewError when this version cannot read it at all.
    """
    version = check(backup, known=len(known_migrations()))
    if version < len(known_migrations()):
        return []  # an older schema: it is migrated when it is opened
    with contextlib.closing(connect(backup, read_only=True)) as connection:
        return verification.problems(connection)


def restore(backup: Path, path: Path) -> None:
    """Restore a checked copy of ``backup`` to ``path``, where no store exists and no daemon holds the lock.

    Raises StoreUnreadableError, StoreTooNewError, StoreInUseError and BackupExistsError, having changed nothing.
    """
    found = check_backup(backup)
    if found:
        raise StoreUnreadableError(backup, found[0])
    lock = StoreLock(path)
    try:
        taken = [p for p in (path, path.with_name(path.name + "-wal")) if p.exists()]
        if taken:
            raise BackupExistsError(taken[0])
        with contextlib.closing(connect(backup, read_only=True)) as source:
            write(source, path)
    finally:
        lock.release()


def _copy(source: sqlite3.Connection, draft: Path) -> None:
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with contextlib.closing(connect(draft)) as copy:
        source.backup(copy)
        # One file without a log beside it, so that it can be moved and copied by hand.
        copy.execute("PRAGMA journal_mode = DELETE")
    sync_tree(draft)
