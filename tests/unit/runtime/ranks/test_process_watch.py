"""The activity of a rank's processes is read from /proc, seldom, and reported every few seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.diagnosis.observation import ProcessSeen
from orchestrator.runtime.ranks.process_inspector import ProcessWatch


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
