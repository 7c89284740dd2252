"""`orch backup` and `orch restore`: the files that they write, their refusals, and that no data is lost."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from orchestrator.spec.settings import Settings
from orchestrator.store.sql.schema import known_migrations
from orchestrator.store.store import Store
from tests.unit.core.builders import ID
from tests.unit.store.lives import add

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a home with a job in its store."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("ORCH_HOME", str(home))
    store = Store.open(_record(home), reserve=None, min_free_bytes=0)
    asyncio.run(add(store, ID))
    store.close()
    return home


def _record(home: Path) -> Path:
    return Settings.from_environ({"ORCH_HOME": str(home)}).paths.store


def _jobs(home: Path) -> list[str]:
    store = Store.open(_record(home), reserve=None, min_free_bytes=0)
    try:
        return [job.id for job in asyncio.run(store.load_live())]
    finally:
        store.close()


def test_a_backup_is_written_checked_and_put_back_in_another_home(
    orch: Orch, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copy.sqlite3"
    done = orch("backup", str(target))
    assert (done.code, done.out.strip()) == (0, str(target)), done.err
    assert orch("backup", str(target), "--check").out.strip() == f"{target} is intact"
    other = tmp_path / "other"
    monkeypatch.setenv("ORCH_HOME", str(other))
    done = orch("restore", str(target), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == {"backup": str(target), "restored": str(_record(other))}
    assert other.stat().st_mode & 0o777 == 0o700
    assert _jobs(other) == [ID]


def test_a_backup_while_the_daemon_has_the_record_open(orch: Orch, home: Path, tmp_path: Path) -> None:
    store = Store.open(_record(home), reserve=None, min_free_bytes=0)
    try:
        asyncio.run(add(store, "b-2"))
        assert orch("backup", str(tmp_path / "copy.sqlite3")).code == 0
        done = orch("restore", str(tmp_path / "copy.sqlite3"))
        assert done.code == 5
    finally:
        store.close()


def test_a_record_is_not_written_over(orch: Orch, home: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.sqlite3"
    orch("backup", str(target))
    done = orch("restore", str(target))
    assert done.code == 5
    assert f"there is a store at {_record(home)}" in done.err
    assert "move" in done.err
    assert _jobs(home) == [ID]
    assert orch("backup", str(target)).code == 5, "nor is a backup"


def test_a_record_of_a_newer_version_is_refused(
    orch: Orch, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copy.sqlite3"
    orch("backup", str(target))
    with closing(sqlite3.connect(target)) as connection:
        connection.execute(f"PRAGMA user_version = {len(known_migrations()) + 1}")
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "other"))
    done = orch("restore", str(target))
    assert done.code == 5
    assert "install the version that wrote it" in done.err
    assert not _record(tmp_path / "other").exists()


@pytest.mark.parametrize("damage", ["no store", "torn"])
def test_a_damaged_backup_changes_nothing(
    orch: Orch, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    target = tmp_path / "copy.sqlite3"
    orch("backup", str(target))
    target.write_bytes(b"text" * 1000 if damage == "no store" else target.read_bytes()[:5000])
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "other"))
    assert orch("restore", str(target)).code == 5
    assert not _record(tmp_path / "other").exists()
    assert orch("backup", str(target), "--check").code == 5


def test_a_backup_whose_record_differs_from_its_events_is_told(orch: Orch, home: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.sqlite3"
    orch("backup", str(target))
    with closing(sqlite3.connect(target)) as connection:
        connection.execute("DELETE FROM events")
        connection.commit()
    done = orch("backup", str(target), "--check", "--json")
    assert done.code == 1
    assert json.loads(done.out)["problems"]


def test_only_the_newest_are_kept(orch: Orch, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    folder.mkdir()
    for day in ("01", "02", "03"):
        (folder / f"orch-202001{day}T000000Z.sqlite3").write_text("old")
    (folder / "notes.txt").write_text("kept")
    done = orch("backup", str(folder), "--keep", "2", "--json")
    assert done.code == 0, done.err
    left = sorted(path.name for path in folder.iterdir())
    assert left[0] == "notes.txt"
    assert left[1] == "orch-20200103T000000Z.sqlite3"
    assert json.loads(done.out)["backup"] == str(folder / left[2])


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (("backup", "x", "--check", "--keep", "2"), 2),
        (("backup", "/nowhere", "--check"), 3),
        (("restore", "/nowhere"), 3),
    ],
)
def test_lines_that_make_no_sense(orch: Orch, home: Path, line: tuple[str, ...], code: int) -> None:
    assert orch(*line).code == code
