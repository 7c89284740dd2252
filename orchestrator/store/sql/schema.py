"""Opens the store's file: checks it before any change, creates it atomically, migrates it by numbered migrations.

A file that is damaged, foreign or newer is refused unchanged. A fresh store is built beside its place and renamed, so
that an empty or incomplete file in that place is always a loss of data, never a new store.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from orchestrator.durable_files import sync_directory, sync_tree
from orchestrator.store.errors import StoreTooNewError, StoreUnreadableError, is_refused_by_disk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

APPLICATION_ID = 0x6F726368  # "orch", in the file's header
BUSY_TIMEOUT_MS = 5000  # the lock excludes other daemons; a user's sqlite3 shell may still hold the file briefly
CHECKED_WHOLE_BYTES = (
    64 * 1024 * 1024
)  # up to this size the whole file is checked at opening (0.1 s); orch doctor checks larger files
_MAGIC = b"SQLite format 3\x00"
_NUMBERED = re.compile(r"(\d{4})_\w+\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema, from ``number - 1`` to ``number``."""

    number: int
    text: str


def known_migrations() -> tuple[Migration, ...]:
    """Return the migrations of this version, in order and without a gap."""
    found = []
    for entry in resources.files("orchestrator.store.sql").joinpath("migrations").iterdir():
        match = _NUMBERED.fullmatch(entry.name)
        if match:
            found.append(Migration(int(match[1]), entry.read_text("utf-8")))
    found.sort(key=lambda m: m.number)
    if [m.number for m in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"migrations are not numbered 1 to {len(found)}: {[m.number for m in found]}")
    return tuple(found)


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a connection with full durability, foreign keys, and no implicit transactions.

    ``read_only`` is for a file that no process writes; no byte of it changes.
    """
    mode = "rw"
    if read_only:  # without a log nothing is replayed, and no file is left beside it
        mode = "ro" if _log_bytes(path) else "ro&immutable=1"
    connection = sqlite3.connect(
        f"file:{_escaped(path)}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
    )
    connection.text_factory = _text
    try:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(path: Path, migrations: Sequence[Migration]) -> None:
    """Create the store at ``path`` if there is none; otherwise check and migrate it.

    Raises StoreUnreadableError and StoreTooNewError, having changed nothing.
    """
    if not path.exists():
        if path.with_name(path.name + "-wal").exists():
            raise StoreUnreadableError(path, "the file is missing, but its write-ahead log is there")
        _create(path, migrations)
        return
    version = check(path, known=len(migrations))
    if version < len(migrations):
        with contextlib.closing(connect(path)) as connection:
            _keep_copy(connection, path, version)
            migrate(connection, migrations)


def check(path: Path, *, known: int) -> int:
    """Return the schema version of the store at ``path``, read without changing a byte of it.

    Raises StoreUnreadableError and StoreTooNewError, and SQLite's own error when the disk is full.
    """
    try:
        with path.open("rb") as file:
            head = file.read(100)
    except OSError as error:
        raise StoreUnreadableError(path, error.strerror or str(error)) from error
    if not head.startswith(_MAGIC):
        raise StoreUnreadableError(path, "it is empty" if not head else "it is not an SQLite database")
    page_bytes = int.from_bytes(head[16:18], "big")
    if page_bytes > 1 and path.stat().st_size % page_bytes and not _log_bytes(path):
        raise StoreUnreadableError(path, "it was cut short")  # SQLite would read zeros for what is missing
    try:
        with contextlib.closing(connect(path, read_only=True)) as connection:
            return _check_content(connection, path, known)
    except sqlite3.DatabaseError as error:
        if is_refused_by_disk(error):
            raise  # reading beside a log takes a little space too
        raise StoreUnreadableError(path, str(error)) from error


def _check_content(connection: sqlite3.Connection, path: Path, known: int) -> int:
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise StoreUnreadableError(path, "it is some other program's database")
    version = _pragma(connection, "user_version")
    if version > known:
        raise StoreTooNewError(path, version, known)
    if path.stat().st_size <= CHECKED_WHOLE_BYTES:
        (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if result != "ok":
            raise StoreUnreadableError(path, result)
    return version


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration]) -> None:
    """Apply missing migrations, each in its own transaction with its number."""
    version = _pragma(connection, "user_version")
    for migration in migrations[version:]:
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements(migration.text):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {migration.number}")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")


def statements(text: str) -> Iterator[str]:
    """Yield the statements of an SQL file."""
    pending = ""
    for line in text.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending.strip()
            pending = ""
    if any(line.strip() and not line.lstrip().startswith("--") for line in pending.splitlines()):
        raise ValueError(f"the last statement is not finished: {pending.strip()!r}")


def _create(path: Path, migrations: Sequence[Migration]) -> None:
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    draft.with_name(draft.name + "-journal").unlink(missing_ok=True)
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with contextlib.closing(connect(draft)) as connection:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # takes effect only before anything is written
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        migrate(connection, migrations)
    draft.replace(path)
    sync_directory(path.parent)


def _keep_copy(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Keep a copy of the older version's store, so that going back to that version is possible."""
    draft = path.with_name(f"{path.name}.v{version}.new")
    draft.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(draft)) as copy:
        connection.backup(copy)
    draft.chmod(0o600)
    sync_tree(draft)
    draft.replace(path.with_name(f"{path.name}.v{version}"))
    sync_directory(path.parent)


def _text(data: bytes) -> str:
    """Return a text column; a damaged one is still text, so that only its row is affected."""
    return data.decode(errors="replace")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


def _log_bytes(path: Path) -> int:
    try:
        return path.with_name(path.name + "-wal").stat().st_size
    except OSError:
        return 0


def _escaped(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
