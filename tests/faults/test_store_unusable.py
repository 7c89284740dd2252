"""An unusable store is refused with the remedy; jobs are untouched, nothing is overwritten. Full disks: test_drills.py."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.ledger import SCRIPT, Ledger, job_spec
from tests.support.stack import Stack, wait_until

pytestmark = pytest.mark.rare


def submit(stack: Stack, ledger: Ledger, directory: Path, **options: object) -> str:
    return stack.submit(job_spec(ledger, **options), directory / "work", train=SCRIPT)  # type: ignore[arg-type]


def steps_on(ledger: Ledger, job_id: str) -> None:
    seen = ledger.last_step(job_id)
    wait_until(f"{job_id} steps on", lambda: ledger.last_step(job_id) > seen + 3)


def newer(store: Path) -> None:
    """Give the store the schema version of a later orch."""
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("PRAGMA user_version = 999")


def damaged(store: Path) -> None:
    """Damage the store as a failing disk does, with an empty write-ahead log, so that nothing repairs it."""
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with store.open("r+b") as file:
        file.seek(40)
        file.write(bytes(2000))


def content(store: Path) -> dict[str, bytes]:
    return {
        p.name: p.read_bytes() for p in store.parent.glob(store.name + "*") if not p.name.endswith(("-shm", "lock"))
    }


def test_a_store_that_cannot_be_used_is_refused_as_it_lies(breakable: Stack, ledger: Ledger, tmp_path: Path) -> None:
    stack, done, store = breakable, tmp_path / "done", breakable.settings.paths.store
    job_id = submit(stack, ledger, tmp_path, until=str(done))
    wait_until("it steps", lambda: ledger.last_step(job_id) >= 6)
    stack.kill_daemon()
    good = tmp_path / "good"
    good.mkdir()
    for name in content(store):
        shutil.copy(store.with_name(name), good / name)
    for spoil, words in ((newer, "999"), (damaged, "cannot be read as a store")):
        spoil(store)
        as_it_lies = content(store)
        refused = stack.orch("up", "--json")
        assert refused.returncode != 0
        assert words in refused.stderr, refused.stderr
        assert content(store) == as_it_lies, "not a byte was changed"
        steps_on(ledger, job_id)
        for name in as_it_lies:
            store.with_name(name).unlink()
        store.with_name(store.name + "-shm").unlink(missing_ok=True)
        for path in good.iterdir():
            shutil.copy(path, store.with_name(path.name))
    stack.up()
    assert stack.job(job_id).attempt == 1
    done.touch()
    assert stack.wait(job_id).state == "SUCCEEDED"
    ledger.check(job_id)
