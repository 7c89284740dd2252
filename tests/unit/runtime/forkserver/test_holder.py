"""The record in a rank's lock file: whole and of this boot, or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime.forkserver import holder, linux
from orchestrator.runtime.forkserver.holder import Holder, Identity, identity_of


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


SOME = Holder(Identity(11, 100), Identity(12, 101), "/sys/fs/cgroup/orch-rank-11-1")


def test_a_record_is_read_as_it_was_written_until_it_is_cleared(handle: int) -> None:
    assert holder.is_clear(handle)
    holder.write(handle, SOME)
    holder.write(handle, Holder(SOME.keeper, SOME.process, None))
    assert holder.read(handle) == Holder(SOME.keeper, SOME.process, None)
    assert not holder.is_clear(handle)
    holder.clear(handle)
    assert holder.is_clear(handle)
    assert holder.read(handle) is None


@pytest.mark.parametrize(
    "change",
    [
        {"boot": "of another life"},
        {"keeper": None},
        {"keeper": [1, 1]},
        {"keeper": [-5, 1]},
        {"keeper": [11, -1]},
        {"keeper": [11, "1"]},
        {"keeper": [True, 1]},
        {"process": [11]},
        {"process": [11.5, 1]},
        {"group": 7},
        {"group": "x" * 5000},
    ],
    ids=str,
)
def test_a_record_that_is_not_one_is_none(handle: int, change: dict[str, Any]) -> None:
    fields = {"boot": linux.boot_id(), "keeper": [11, 1], "process": [12, 1], "group": None} | change
    os.pwrite(handle, json.dumps(fields).encode(), 0)
    assert holder.read(handle) is None


@pytest.mark.parametrize("data", [b"[]", b"{", b"\xff\xfe", b"null"])
def test_neither_is_anything_else(handle: int, data: bytes) -> None:
    os.pwrite(handle, data, 0)
    assert holder.read(handle) is None
    assert not holder.is_clear(handle)


def test_a_process_is_its_number_and_its_start() -> None:
    own = identity_of(os.getpid())
    assert own is not None
    assert own.lives()
    assert not Identity(own.pid, own.started + 1).lives(), "another one has its number"
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        told = identity_of(child.pid)
        assert told is not None
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not told.lives(), "a zombie holds nothing any more"
    assert identity_of(child.pid) != told


MARKS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from orchestrator.runtime.forkserver import linux
assert linux.mark_environment("MARK", "tree/1")
assert not linux.mark_environment("MARK", "x" * 100), "there is no room"
assert not linux.mark_environment("OTHER", "x")
if os.fork() == 0:
    print(open("/proc/self/environ").read().replace("\\0", "|"), os.environ["MARK"].strip() or "unchanged")
else:
    os.wait()
"""


def test_a_mark_shows_in_the_environment_of_the_process_and_its_forks() -> None:
    root = str(Path(holder.__file__).parents[3])
    env = {"FIRST": "1", "MARK": " " * 20, "LAST": "2"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", MARKS, root], env=env, capture_output=True, text=True, check=True
    )
    assert "FIRST=1|MARK=tree/1|" in done.stdout
    assert "|LAST=2|" in done.stdout
    assert done.stdout.strip().endswith("unchanged"), "the program's own variables are not touched"
