"""Looks at real processes that compute, sleep, wait in a lock, or are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from orchestrator.core.diagnosis.health import RankLook, Standing, Wait, standing
from orchestrator.parts import install_line
from orchestrator.runtime.ranks import process_inspector as looking
from orchestrator.runtime.ranks.process_inspector import look_at, report_lines
from tests.support.stack import wait_until

SCRIPT = """
import sys, threading, time
def work():
    while True: sum(range(1000))
def lock():
    held = threading.Lock(); held.acquire(); held.acquire()
def timed():
    held = threading.Lock(); held.acquire(); held.acquire(timeout=600)
def pipe():
    sys.stdin.read()
def sleep():
    time.sleep(600)
print("ready", flush=True)
globals()[sys.argv[1]]()
"""


class Doer:
    """Processes that do one thing each."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, what: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid


@pytest.fixture
def doer() -> Iterator[Doer]:
    made = Doer()
    yield made
    for process in made.processes:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def twice(pid: int) -> tuple[RankLook, RankLook]:
    """Return two looks that are at least half a second apart."""
    before = look_at(3, pid, stacks=True)

    def later() -> RankLook | None:
        after = look_at(3, pid, stacks=True)
        return after if after.at - before.at >= 0.5 else None

    return before, wait_until("half a second later", later)


@pytest.mark.parametrize(
    ("what", "found"),
    [("work", Standing.WORKS), ("lock", Standing.LOCKED), ("timed", Standing.OUTSIDE), ("sleep", Standing.OUTSIDE), ("pipe", Standing.OUTSIDE)],
)  # fmt: skip
def test_what_a_process_does(doer: Doer, what: str, found: Standing) -> None:
    pid = doer.start(what)
    wait_until("it does it", lambda: what in look_at(3, pid, stacks=True).place or what == "work")

    def looked() -> tuple[Standing, RankLook] | None:
        before, after = twice(pid)
        seen = standing(before, after)
        return None if seen is Standing.UNKNOWN else (seen, after)  # on a busy machine it may have had no processor

    seen, after = wait_until("two looks that show it", looked)
    # Pure computing in one line may be seen twice at the same place: it counts as spinning, which is no proof either.
    assert seen is found or (what == "work" and seen is Standing.SPINS)
    assert (after.pid, after.rank, after.problem) == (pid, 3, "")


def test_a_stopped_process_is_seen_even_when_it_is_a_child(doer: Doer) -> None:
    pid = doer.start("work")
    os.kill(pid, signal.SIGSTOP)
    look = wait_until("it is stopped", lambda: (x := look_at(3, pid, stacks=True)).state == "T" and x)
    assert (look.stopped_pid, look.problem) == (pid, "")
    assert look.threads[0].frames
    above = look_at(0, os.getpid(), stacks=False)
    assert (above.state, above.stopped_pid) == ("T", pid)
    assert any("is stopped" in line for line in report_lines(look))


def test_stacks_are_told_with_what_is_known_of_the_process(doer: Doer) -> None:
    pid = doer.start("lock")
    look = wait_until("it waits", lambda: (x := look_at(3, pid, stacks=True)).wait is Wait.LOCK and x)
    lines = "\n".join(report_lines(look))
    assert f"stacks of rank 3: process {pid}, state S" in lines
    assert "lock (<string>:6)" in lines


def test_a_process_that_is_gone_is_no_error() -> None:
    look = look_at(0, 2**22 + 1, stacks=True)
    assert (look.state, look.problem) == ("", "its process is gone")


def test_without_py_spy_the_rest_is_still_seen(doer: Doer, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = doer.start("lock")
    wait_until("it waits", lambda: look_at(3, pid, stacks=False).wait is Wait.LOCK)
    monkeypatch.setattr(looking, "find_py_spy", lambda: None)
    look = look_at(3, pid, stacks=True)
    assert (look.state, look.wait, look.threads) == ("S", Wait.LOCK, ())
    assert install_line("stacks") in look.problem


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "#!/bin/sh\necho 'Permission Denied: Try running again with elevated permissions' >&2; exit 1",
            "ptrace_scope",
        ),
        ("#!/bin/sh\necho 'no python here' >&2; exit 1", "no python here"),
        ("#!/bin/sh\necho '[{}]'", "cannot be parsed"),
    ],
)
def test_a_py_spy_that_fails_is_told(
    doer: Doer, monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str], script: str, words: str
) -> None:
    tool = os.path.join(tmp_path, "py-spy")
    with open(tool, "w") as file:
        file.write(script)
    os.chmod(tool, 0o755)
    monkeypatch.setattr(looking, "find_py_spy", lambda: tool)
    look = look_at(3, doer.start("sleep"), stacks=True)
    assert words in look.problem
    assert look.threads == ()
