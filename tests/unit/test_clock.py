"""The daemon's clock: what no step of the wall clock, restart or boot can do to it."""

from __future__ import annotations

import time

import pytest

from orchestrator.clock import STEP_SECONDS, ClockReading, SteadyClock, elapsed, this_boot

DAY = 25 * 3600.0


class Machine:
    """A machine whose clocks the test sets."""

    def __init__(self) -> None:
        self.wall, self.up, self.boots = 1_700_000_000.0, 50.0, 1

    def clock(self) -> SteadyClock:
        return SteadyClock(wall=lambda: self.wall, elapsed=lambda: self.up, boot=lambda: f"boot {self.boots}")

    def run(self, seconds: float) -> None:
        self.wall += seconds
        self.up += seconds


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.mark.parametrize("step", [-DAY, -1.0, 1.0, DAY])
def test_a_step_changes_the_clock_only_when_it_is_moved(machine: Machine, step: float) -> None:
    clock, began = machine.clock(), machine.wall
    machine.run(10)
    machine.wall += step
    assert clock.now() == began + 10
    assert clock.step == pytest.approx(step)
    clock.move(clock.step)
    assert (clock.now(), clock.step) == (pytest.approx(machine.wall), 0.0)


def test_a_difference_that_no_decision_sees_is_left(machine: Machine) -> None:
    clock = machine.clock()
    machine.wall += STEP_SECONDS / 2
    assert clock.step == 0.0


@pytest.mark.parametrize("step", [-DAY, 0.0, DAY])
def test_the_next_daemon_goes_on_where_the_clock_would_be(machine: Machine, step: float) -> None:
    reading = machine.clock().reading()
    machine.run(7200)
    machine.wall += step
    clock = machine.clock()
    assert clock.resume(reading) == 0.0
    assert (clock.now(), clock.step) == (pytest.approx(reading.at + 7200), pytest.approx(step))


def test_after_a_boot_the_wall_clock_says_what_nothing_has_measured(machine: Machine) -> None:
    reading = machine.clock().reading()
    machine.boots, machine.up, machine.wall = 2, 3.0, machine.wall + DAY
    clock = machine.clock()
    assert clock.resume(reading) == DAY
    assert (clock.now(), clock.step) == (machine.wall, 0.0)


def test_after_a_boot_with_a_clock_that_was_set_back_no_time_has_passed(machine: Machine) -> None:
    reading = machine.clock().reading()
    machine.boots, machine.up, machine.wall = 2, 3.0, machine.wall - DAY
    clock = machine.clock()
    assert clock.resume(reading) == 0.0
    assert (clock.now(), clock.step) == (reading.at, -DAY)


def test_the_machine_tells_its_boot_and_the_time_since() -> None:
    before = elapsed()
    reading = SteadyClock().reading()
    assert reading == ClockReading(this_boot(), reading.elapsed, reading.at)
    assert before <= reading.elapsed <= elapsed()
    assert reading.at <= time.time() + STEP_SECONDS
