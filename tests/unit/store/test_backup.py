"""Backups: written while the store works, checked, and restored only where there is no store."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.store.backup import check_backup, restore
from orchestrator.store.errors import (
    BackupExistsError,
    StoreError,
    StoreInUseError,
    StoreTooNewError,
    StoreUnreadableError,
)
from orchestrator.store.sql.schema import connect
from tests.unit.core.builders import ID
from tests.unit.store.lives import add, end, note, run_it, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.store.store import Store

    Run = Callable[..., Any]
    Open = Callable[..., Store]


@pytest.fixture
def backup(store: Store, run: Run, tmp_path: Path) -> Path:
    """Return a backup of a store with a job that runs and one that ended."""
    run(run_it(store, run(add(store, ID))))
    run(end(store, run(add(store, "b-2"))))
    target = tmp_path / "copy.db"
    run(store.backup(target))
    return target


def test_a_backup_is_one_file_that_opens_as_a_store(store: Store, open_store: Open, run: Run, backup: Path) -> None:
    assert sorted(p.name for p in backup.parent.glob("copy.db*")) == ["copy.db"]
    assert backup.stat().st_mode & 0o777 == 0o600
    assert check_backup(backup) == []
    copy = open_store(backup)
    assert run(copy.load_live()) == run(store.load_live())
    assert run(copy.finished_counts()) == run(store.finished_counts())
    assert run(copy.events(ID)) == run(store.events(ID))


def test_a_backup_is_whole_while_others_write(store: Store, run: Run, tmp_path: Path) -> None:
    async def write_meanwhile() -> None:
        job = await add(store, ID)
        backing = asyncio.create_task(store.backup(tmp_path / "copy.db"))
        for n in range(40):
            await write(store, [note(job, f"{n}")])
        await backing

    run(write_meanwhile())
    assert check_backup(tmp_path / "copy.db") == []


def test_a_file_that_is_there_is_not_overwritten(store: Store, run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(BackupExistsError, match="was left alone: name a path that does not exist"):
        run(store.backup(tmp_path / "mine"))
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_place_that_cannot_be_written_is_named(store: Store, run: Run, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"No such file or directory.*choose a directory"):
        run(store.backup(tmp_path / "nowhere" / "copy.db"))


def test_checking_changes_nothing(backup: Path) -> None:
    before = backup.read_bytes()
    check_backup(backup)
    assert backup.read_bytes() == before
    assert sorted(p.name for p in backup.parent.glob("copy.db*")) == ["copy.db"]


def test_a_store_is_restored(open_store: Open, run: Run, backup: Path, tmp_path: Path) -> None:
    restore(backup, tmp_path / "new.db")
    store = open_store(tmp_path / "new.db")
    assert [j.id for j in run(store.load_live())] == [ID]
    assert run(store.verify()) == []
    assert backup.exists()


class TestRefused:
    """Backups that are not restored, and change nothing."""

    def test_onto_a_store(self, backup: Path, store: Store, path: Path) -> None:
        store.close()
        before = path.read_bytes()
        with pytest.raises(BackupExistsError):
            restore(backup, path)
        assert path.read_bytes() == before

    def test_beside_a_log_whose_store_is_gone(self, backup: Path, tmp_path: Path) -> None:
        (tmp_path / "new.db-wal").write_bytes(b"x")
        with pytest.raises(BackupExistsError, match=r"new\.db-wal"):
            restore(backup, tmp_path / "new.db")
        assert not (tmp_path / "new.db").exists()

    def test_under_a_daemon(self, backup: Path, store: Store, path: Path) -> None:
        with pytest.raises(StoreInUseError):
            restore(backup, path)
        assert store.disk().trouble is None

    def test_a_damaged_one(self, backup: Path, tmp_path: Path) -> None:
        content = bytearray(backup.read_bytes())
        content[8192:12288] = os.urandom(4096)
        backup.write_bytes(content)
        with pytest.raises(StoreUnreadableError, match="nothing was overwritten"):
            restore(backup, tmp_path / "new.db")
        assert not (tmp_path / "new.db").exists()

    def test_one_that_was_tampered_with(self, backup: Path, tmp_path: Path) -> None:
        with closing(sqlite3.connect(backup, isolation_level=None)) as connection:
            connection.execute("UPDATE jobs SET state = 'CANCELLED' WHERE id = ?", (ID,))
        with pytest.raises(StoreUnreadableError, match=f"job {ID}: its row differs.*state"):
            restore(backup, tmp_path / "new.db")

    def test_one_of_a_newer_version(self, backup: Path, tmp_path: Path) -> None:
        with closing(connect(backup)) as connection:
            connection.execute("PRAGMA user_version = 99")
        with pytest.raises(StoreTooNewError):
            restore(backup, tmp_path / "new.db")

    def test_one_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(StoreUnreadableError, match="No such file"):
            restore(tmp_path / "missing.db", tmp_path / "new.db")
