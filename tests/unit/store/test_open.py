"""Opening a store: it is made, migrated, or refused without a change."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.store.errors import StoreInUseError, StoreTooNewError, StoreUnreadableError
from orchestrator.store.sql.schema import Migration, connect, known_migrations, migrate
from orchestrator.store.store import Store
from tests.support.stack import PATIENCE_SECONDS
from tests.unit.core.builders import ID, submission
from tests.unit.store.lives import add, run_it

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., Any]
    Open = Callable[..., Store]

MIGRATIONS = known_migrations()


def bytes_under(directory: Path) -> dict[str, bytes]:
    """Return all files but the lock, which names the last opener, and the index of a log, which SQLite rebuilds."""
    return {p.name: p.read_bytes() for p in directory.iterdir() if not p.name.endswith((".lock", "-shm"))}


def refused(path: Path, error: type[Exception], message: str, **options: Any) -> None:
    """Check that opening is refused with ``message``, and that every file is unchanged."""
    before = bytes_under(path.parent)
    with pytest.raises(error, match=message):
        Store.open(path, reserve=None, **options)
    assert bytes_under(path.parent) == before


def schema_of(path: Path) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name").fetchall()
        pragmas = ("user_version", "application_id", "auto_vacuum", "encoding")
        return [*found, *((p, str(connection.execute(f"PRAGMA {p}").fetchone()[0])) for p in pragmas)]


def test_a_fresh_store_is_private_and_alone(open_store: Open, path: Path) -> None:
    open_store().close()
    assert sorted(p.name for p in path.parent.iterdir()) == ["orch.db", "orch.db.lock"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_writing_is_durable_and_guarded(store: Store, path: Path) -> None:
    connection = store._writer._connection
    values = {
        p: connection.execute(f"PRAGMA {p}").fetchone()[0] for p in ("journal_mode", "synchronous", "foreign_keys")
    }
    assert values == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    assert connection.execute("PRAGMA busy_timeout").fetchone()[0] > 0


def test_what_was_written_is_there_after_opening_again(open_store: Open, run: Run) -> None:
    first = open_store()
    job = run(run_it(first, run(add(first, ID))))
    first.close()
    second = open_store()
    assert run(second.load_live()) == [job]
    assert run(add(second, "b-2")).submission.sequence == 2


def test_a_directory_with_odd_letters_will_do(open_store: Open, run: Run, tmp_path: Path) -> None:
    odd = tmp_path / "a ?#%20'b"
    odd.mkdir()
    store = open_store(odd / "orch.db")
    run(add(store, ID))
    assert (odd / "orch.db").exists()


class TestMigrations:
    """Migrations are numbered, and a migrated store equals a new one."""

    def test_a_migrated_store_equals_a_fresh_one(self, open_store: Open, tmp_path: Path) -> None:
        old, fresh = tmp_path / "old.db", tmp_path / "fresh.db"
        later = (*MIGRATIONS, Migration(len(MIGRATIONS) + 1, "CREATE TABLE later (x);\n"))
        open_store(old).close()
        open_store(fresh, migrations=later).close()
        assert schema_of(old) != schema_of(fresh)
        open_store(old, migrations=later).close()
        assert schema_of(old) == schema_of(fresh)
        assert ("auto_vacuum", "2") in schema_of(fresh), "space that is freed goes back to the disk"

    def test_the_store_of_the_older_version_is_kept(self, open_store: Open, run: Run, path: Path) -> None:
        store = open_store()
        job = run(add(store, ID))
        store.close()
        later = Migration(len(MIGRATIONS) + 1, "CREATE TABLE later (x);\n")
        open_store(migrations=(*MIGRATIONS, later)).close()
        kept = path.with_name(f"orch.db.v{len(MIGRATIONS)}")
        assert run(open_store(kept).load_live()) == [job]
        assert kept.stat().st_mode & 0o777 == 0o600

    def test_a_step_that_fails_leaves_the_store_as_it_was(self, open_store: Open, run: Run, path: Path) -> None:
        store = open_store()
        job = run(add(store, ID))
        store.close()
        broken = Migration(len(MIGRATIONS) + 1, "CREATE TABLE half (x);\nINSERT INTO nowhere VALUES (1);\n")
        with pytest.raises(StoreUnreadableError, match="nowhere"):
            open_store(migrations=(*MIGRATIONS, broken))
        with closing(connect(path)) as connection:
            assert connection.execute("SELECT name FROM sqlite_schema WHERE name = 'half'").fetchall() == []
        assert run(open_store().load_live()) == [job]

    def test_a_store_that_is_up_to_date_is_left_alone(self, open_store: Open, path: Path) -> None:
        open_store().close()
        before = path.read_bytes()
        with closing(connect(path)) as connection:
            migrate(connection, MIGRATIONS)
        assert path.read_bytes() == before


class TestRefused:
    """Files that are not a store for this version: nothing is overwritten."""

    def make(self, path: Path) -> None:
        Store.open(path, reserve=None, min_free_bytes=0).close()

    def test_a_store_of_a_newer_version(self, path: Path) -> None:
        self.make(path)
        with closing(connect(path)) as connection:
            connection.execute("PRAGMA user_version = 99")
        refused(path, StoreTooNewError, "schema version 99.*install the version that wrote it.*nothing was changed")

    def test_a_store_of_a_newer_version_that_was_not_closed(self, path: Path) -> None:
        self.make(path)
        code = (
            "import sqlite3, os, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
            "c.execute('PRAGMA journal_mode = WAL'); c.execute('PRAGMA user_version = 99'); os._exit(0)"
        )
        subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=PATIENCE_SECONDS)
        assert path.with_name("orch.db-wal").stat().st_size > 0
        refused(path, StoreTooNewError, "schema version 99")

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "it is empty"),
            (b"hello, world\n" * 1000, "it is not an SQLite database"),
            (b"SQLite format 3\x00", ""),
            (b"SQLite format 3\x00" + bytes(5000), ""),
            (os.urandom(20000), "it is not an SQLite database"),
        ],
        ids=["empty", "text", "header", "zeros", "random"],
    )
    def test_a_file_that_is_no_database(self, path: Path, content: bytes, reason: str) -> None:
        path.write_bytes(content)
        refused(path, StoreUnreadableError, f"cannot be read as a store \\({reason}.*restore a backup")

    def test_a_database_of_some_other_program(self, path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE theirs (x)")
            connection.commit()
        refused(path, StoreUnreadableError, "some other program's database")

    def test_a_directory(self, path: Path) -> None:
        path.mkdir()
        with pytest.raises(StoreUnreadableError, match="Is a directory"):
            Store.open(path, reserve=None)

    def test_a_directory_that_is_not_there(self, path: Path) -> None:
        with pytest.raises(StoreUnreadableError, match="No such file or directory"):
            Store.open(path / "deeper" / "orch.db", reserve=None)

    @pytest.mark.parametrize("cut", [100, 5000, 20000])
    def test_a_store_that_was_cut_short(self, path: Path, open_store: Open, run: Run, cut: int) -> None:
        store = open_store()
        for n in range(20):
            run(add(store, f"job-{n}"))
        store.close()
        os.truncate(path, path.stat().st_size - cut)
        refused(path, StoreUnreadableError, "cannot be read as a store")

    def test_a_store_with_a_page_of_noise(self, path: Path, open_store: Open, run: Run) -> None:
        store = open_store()
        for n in range(20):
            run(add(store, f"job-{n}"))
        store.close()
        content = bytearray(path.read_bytes())
        content[4096:8192] = os.urandom(4096)
        path.write_bytes(content)
        refused(path, StoreUnreadableError, "cannot be read as a store")

    def test_a_log_without_its_store(self, path: Path) -> None:
        path.with_name("orch.db-wal").write_bytes(b"x" * 100)
        refused(path, StoreUnreadableError, "write-ahead log is there")

    def test_after_a_refusal_the_store_can_be_opened_by_another(self, path: Path, open_store: Open) -> None:
        path.write_bytes(b"nonsense")
        refused(path, StoreUnreadableError, "not an SQLite database")
        path.unlink()
        assert open_store().disk().trouble is None
        assert sorted(p.suffix for p in path.parent.iterdir()) == [".db", ".db-shm", ".db-wal", ".lock"]


class TestHeld:
    """One process at a time has the store open."""

    def test_a_second_opening_is_refused_with_the_holders_pid(self, store: Store, path: Path) -> None:
        with pytest.raises(StoreInUseError, match=f"process {os.getpid()}: stop that daemon") as caught:
            Store.open(path, reserve=None)
        assert caught.value.pid == os.getpid()
        assert store.disk().reserve_present

    def test_another_process_is_refused_until_the_first_has_let_go(self, open_store: Open, path: Path) -> None:
        code = (
            "import sys, pathlib; from orchestrator.store.store import Store;"
            "s = Store.open(pathlib.Path(sys.argv[1]), reserve=None); print('held', flush=True); sys.stdin.read()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder:
            try:
                assert holder.stdout is not None
                assert holder.stdout.readline() == b"held\n"
                with pytest.raises(StoreInUseError, match=f"process {holder.pid}"):
                    Store.open(path, reserve=None)
            finally:
                holder.kill()
        assert open_store().disk().trouble is None, "the kernel lets go for the dead"

    def test_a_draft_that_a_dead_process_left_is_no_hindrance(self, open_store: Open, path: Path, run: Run) -> None:
        path.with_name("orch.db.new").write_bytes(b"half made")
        path.with_name("orch.db.new-journal").write_bytes(b"half made")
        run(open_store().submit(submission()))
        assert not path.with_name("orch.db.new").exists()
