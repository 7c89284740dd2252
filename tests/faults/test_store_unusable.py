"""The record cannot be used, or cannot grow: refused with the remedy, running jobs untouched, nothing overwritten."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.api.errors import EXIT_REFUSED, DiskFullError
from orchestrator.cli.drills.disk_filler import DiskFiller
from tests.support.ledger import SCRIPT, Ledger, job_spec
from tests.support.stack import Stack, wait_until


def submit(stack: Stack, ledger: Ledger, directory: Path, **options: object) -> str:
    return stack.submit(job_spec(ledger, **options), directory / "work", train=SCRIPT)  # type: ignore[arg-type]


def steps_on(ledger: Ledger, job_id: str) -> None:
    seen = ledger.last_step(job_id)
    wait_until(f"{job_id} steps on", lambda: ledger.last_step(job_id) > seen + 3)


def newer(store: Path) -> None:
    """As a later version leaves it."""
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("PRAGMA user_version = 999")


def damaged(store: Path) -> None:
    """As a failing disk leaves it, with nothing in the log that would heal it."""
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


@pytest.fixture
def cramped() -> Iterator[Stack]:
    """A daemon whose home is on a file system of 300 MiB."""
    stack = Stack()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300m,mode=0700", "tmpfs", str(stack.home)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        stack.home.rmdir()
        pytest.skip("mounting a file system of our own is not permitted")
    try:
        stack.up()
        yield stack
    finally:
        stack.close()
        unmount = ["umount", str(stack.home)]  # the kernel may still be at the end of what was killed a moment ago
        wait_until("nothing uses it", lambda: subprocess.run(unmount, capture_output=True, check=False).returncode == 0)
        stack.home.rmdir()


def test_a_full_disk_under_the_home_stops_new_jobs_only(cramped: Stack, ledger: Ledger, tmp_path: Path) -> None:
    stack, done = cramped, tmp_path / "done"
    running = submit(stack, ledger, tmp_path, name="running", until=str(done))
    wait_until("it steps", lambda: ledger.last_step(running) >= 6)
    with DiskFiller(stack.home) as filler:
        filler.fill()
        with pytest.raises(DiskFullError) as refused:
            submit(stack, ledger, tmp_path, name="new", steps=1)
        assert "orch prune" in f"{refused.value} {refused.value.hint}"
        (tmp_path / "work" / "job.yaml").write_text(job_spec(ledger, name="new", steps=1))
        assert stack.orch("submit", "job.yaml", cwd=tmp_path / "work").returncode == EXIT_REFUSED
        steps_on(ledger, running)
        told = stack.orch("update", running, "--priority", "60")
        assert told.returncode == 0, told.stderr
        assert stack.job(running).priority == 60, "what happens to a running job is still written"
    done.touch()
    job = stack.wait(running)
    assert (job.state, job.attempt) == ("SUCCEEDED", 1), job.failure
    ledger.check()
    after = wait_until("new jobs are taken again", lambda: accepted(stack, ledger, tmp_path))
    assert stack.wait(after).state == "SUCCEEDED"


def accepted(stack: Stack, ledger: Ledger, directory: Path) -> str | None:
    try:
        return submit(stack, ledger, directory, name="after", steps=1)
    except DiskFullError:
        return None
