"""A rank's lock file: its holder, its content, and its removal. Trees are real processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.private_files import NotPrivateError
from orchestrator.runtime.forkserver import holder
from orchestrator.runtime.forkserver.holder import MARK, Holder, Identity, identity_of
from orchestrator.runtime.spawn.rank_locks import (
    clear_locks,
    end_remains,
    end_tree,
    lock_is_clear,
    lock_is_free,
    mark_of,
    open_lock,
    rank_lock_path,
    remains,
    remove_locks,
    tree_mark,
    try_lock,
)
from tests.support.stack import process_gone, wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = rank_lock_path(tmp_path / "space" / "node", "job-aaaaaa", 3)
    found.parent.mkdir(parents=True)
    return found


@contextmanager
def held(path: Path, keeper: Identity | None = None, process: Identity | None = None) -> Iterator[int]:
    """Hold the lock for a tree with this keeper and process."""
    handle = open_lock(path)
    assert try_lock(handle, path)
    if keeper is not None and process is not None:
        holder.write(handle, Holder(keeper, process, None))
    yield handle
    os.close(handle)


def written(path: Path, keeper: Identity, process: Identity) -> None:
    """Leave the lock file as a killed keeper of such a tree does."""
    with held(path, keeper, process):
        pass


def sleeper(path: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, marked as the tree of ``path``."""
    env = dict(os.environ) | ({MARK: mark_of(path)} if path is not None else {})
    return subprocess.Popen(SLEEP, start_new_session=True, env=env)


def known(process: subprocess.Popen[bytes]) -> Identity:
    found = identity_of(process.pid)
    assert found is not None
    return found


GONE = Identity(2**22 - 1, 1)


def test_a_lock_is_free_when_nothing_holds_it(path: Path) -> None:
    assert lock_is_free(path)
    assert lock_is_clear(path)
    with held(path):
        assert not lock_is_free(path)
        assert not lock_is_clear(path)
    assert lock_is_free(path)
    written(path, GONE, GONE)
    assert lock_is_free(path)
    assert not lock_is_clear(path), "its keeper did not say that all ended"


def test_a_file_that_was_replaced_is_not_locked(path: Path) -> None:
    handle = open_lock(path)
    path.unlink()
    assert not try_lock(handle, path)
    os.close(open_lock(path))
    assert not try_lock(handle, path)
    os.close(handle)


def test_a_link_is_not_opened(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotPrivateError, match="symbolic"):
        open_lock(path)
    assert (tmp_path / "elsewhere").read_text() == "kept"


def test_the_mark_names_space_job_and_rank(path: Path, tmp_path: Path) -> None:
    assert mark_of(path) == tree_mark(tmp_path / "space" / "node", "job-aaaaaa", 3) == "space/job-aaaaaa/3"


def test_what_a_killed_keeper_leaves_is_found_by_its_session_and_its_mark(path: Path) -> None:
    with sleeper() as leader, sleeper(path) as marked, sleeper() as stranger:
        wait_until("they are programs of their own", lambda: remains(None, mark_of(path)) == {marked.pid})
        written(path, GONE, known(leader))
        assert remains(Holder(GONE, known(leader), None), mark_of(path)) == {leader.pid, marked.pid}
        assert end_remains(path, 20.0)
        assert [leader.wait(300), marked.wait(300)] == [-9, -9]
        assert stranger.poll() is None
        stranger.kill()
    assert lock_is_clear(path)


def test_a_session_whose_number_another_process_has_is_left_alone(path: Path) -> None:
    with sleeper() as stranger:
        written(path, GONE, Identity(stranger.pid, known(stranger).started + 1))
        assert end_remains(path, 20.0)
        assert stranger.poll() is None
        stranger.kill()


def test_nothing_is_ended_while_a_keeper_holds_the_lock(path: Path) -> None:
    with sleeper() as leader:
        with held(path, known(leader), known(leader)):
            assert not end_remains(path, 0.1)
            assert leader.poll() is None
        assert end_remains(path, 20.0)


KEEPER = """
import fcntl, os, sys, time
handle = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(handle, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [True, False])
def test_a_keeper_that_does_not_end_is_killed(path: Path, stopped: bool) -> None:
    os.close(open_lock(path))
    with (
        subprocess.Popen([sys.executable, "-c", KEEPER, path], stdout=subprocess.PIPE) as keeper,
        sleeper() as kept,
    ):
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"held\n"
        handle = os.open(path, os.O_RDWR)
        holder.write(handle, Holder(known(keeper), known(kept), None))
        os.close(handle)
        if stopped:
            os.kill(keeper.pid, 19)
        assert end_tree(path, 60.0, limit=0.1)
        assert process_gone(keeper.pid)
        assert process_gone(kept.pid)


def test_lock_files_go_with_their_job(path: Path, tmp_path: Path) -> None:
    node = tmp_path / "space" / "node"
    other = rank_lock_path(node, "job-bbbbbb", 0)
    for each in (path, other):
        os.close(open_lock(each))
    remove_locks(node, "job-aaaaaa")
    assert not path.exists()
    assert other.exists()
    with held(other):
        remove_locks(node, "job-bbbbbb")
        assert other.exists(), "its tree lives"
    written(other, GONE, GONE)
    remove_locks(node, "job-bbbbbb")
    assert other.exists(), "something may be left of it"


def test_lock_files_of_jobs_that_are_not_live_are_cleared(path: Path, tmp_path: Path) -> None:
    node = tmp_path / "space" / "node"
    with sleeper(path) as left:
        wait_until("it is a program of its own", lambda: remains(None, mark_of(path)) == {left.pid})
        written(path, GONE, GONE)
        clear_locks(node, {"job-aaaaaa"}, young_seconds=-1.0)
        clear_locks(node, set())
        assert path.exists(), "live, then young"
        assert left.poll() is None
        clear_locks(node, set(), young_seconds=-1.0)
        assert left.wait(300) == -9
    assert not path.exists()
    with held(path) as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        clear_locks(node, set(), young_seconds=-1.0)
        assert path.exists()
