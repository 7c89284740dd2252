"""Processes of ranks, seen from outside: what they do, what their threads wait for, what they use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.core.diagnosis.health import RankLook, Standing, Wait, standing
from orchestrator.core.diagnosis.observation import ProcessSeen
from orchestrator.parts import install_line
from orchestrator.runtime.ranks import process_inspector as looking
from orchestrator.runtime.ranks.process_inspector import ProcessWatch, look_at, report_lines
from tests.support.stack import wait_until


class Machine:
    """A separate /proc, and a clock."""

    def __init__(self, path: Path) -> None:
        self.proc = path
        self.now = 100.0
        (path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
        self.watch = ProcessWatch(procfs=path, clock=lambda: self.now)

    def process(
        self, pid: int, *, state: str = "S", ticks: int = 0, pages: int = 1, wchan: str = "do_poll", **more: str
    ) -> None:
        task = self.proc / str(pid) / "task" / str(pid)
        task.mkdir(parents=True, exist_ok=True)
        fields = [state, *["0"] * 10, str(ticks), "0", "0", "0", *["0"] * 6, str(pages), "0"]
        (self.proc / str(pid) / "stat").write_text(f"{pid} (py) thon) {' '.join(fields)}")
        (self.proc / str(pid) / "wchan").write_text(wchan)
        (task / "comm").write_text(more.get("comm", "python"))
        (task / "children").write_text(more.get("children", ""))

    def pass_by(self, seconds: int, root: int = 7, training: int | None = None) -> ProcessSeen:
        for _ in range(seconds):
            self.now += 1.0
            self.watch.look(root, training)
        assert self.watch.newest is not None
        return self.watch.newest


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("state", "wchan", "asleep", "locked"),
    [
        ("S", "do_poll", True, False),
        ("D", "folio_wait", True, False),
        ("S", "futex_wait_queue", False, True),
        ("S", "hrtimer_nanosleep", False, False),
        ("R", "0", False, False),
    ],
)
def test_what_the_training_thread_waits_for(
    machine: Machine, state: str, wchan: str, asleep: bool, locked: bool
) -> None:
    machine.process(7, state=state, wchan=wchan)
    seen = machine.pass_by(16)
    assert seen.looks == 16
    assert (seen.asleep, seen.locked) == (16 * asleep, 16 * locked)


def test_processor_time_and_memory_are_those_of_every_process_below(machine: Machine) -> None:
    machine.process(7, ticks=100, pages=10, children="8", comm="pt_gloo_runner")
    machine.process(8, ticks=50, pages=5)
    seen = machine.pass_by(6, training=7)
    single = ProcessWatch(procfs=machine.proc, clock=lambda: machine.now)
    single.look(8, None)
    assert single.newest is not None
    assert seen.cpu_seconds == pytest.approx(3.0 * single.newest.cpu_seconds)
    assert seen.resident_bytes == 3 * single.newest.resident_bytes > 0
    assert seen.available_bytes == 1000 * 1024
    assert seen.grouped
    assert not single.newest.grouped


def test_it_is_told_every_five_seconds_and_a_new_process_begins_at_nothing(machine: Machine) -> None:
    machine.process(7)
    machine.pass_by(1)
    number = machine.watch.number
    machine.pass_by(20)
    assert machine.watch.number == number + 4
    machine.watch.begin()
    assert machine.watch.newest is None
    assert machine.pass_by(1).looks == 1


def test_a_process_that_is_gone_is_not_told_of(machine: Machine) -> None:
    machine.now += 10.0
    machine.watch.look(7, None)
    machine.watch.look(0, None)
    assert (machine.watch.newest, machine.watch.number) == (None, 0)


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
