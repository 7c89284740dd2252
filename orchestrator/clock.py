"""The daemon's clock: the wall time without its steps.

Every deadline and duration in a job's record is by this clock. It advances with CLOCK_BOOTTIME, so a step of the wall
clock changes nothing by itself. The loop (``daemon/loop.py``) notices the step, moves the deadlines in all records and
then this clock, in that order and in one transaction. A daemon that starts again continues the clock of the last one:
exactly where the machine has not booted since, else from the time at which that one was last known to run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_SECONDS: Final = 0.5
"""A smaller difference from the wall clock is left: no decision depends on it."""


def elapsed() -> float:
    """Return the seconds since the machine has booted, its sleep included; no step changes them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def this_boot() -> str:
    """Return the id of the machine's present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


@dataclass(frozen=True, slots=True)
class ClockReading:
    """What another daemon needs to continue this clock: the boot, the time since then, and the clock's time."""

    boot: str
    elapsed: float
    at: float


class SteadyClock:
    """``wall`` is the clock that may step, ``elapsed`` the one that cannot, ``boot`` the id of the latter's beginning."""

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = elapsed,
        boot: Callable[[], str] = this_boot,
    ) -> None:
        self._wall, self._elapsed, self._boot = wall, elapsed, boot
        self._ahead = wall() - elapsed()

    def now(self) -> float:
        """Return the time, in seconds since the epoch."""
        return self._elapsed() + self._ahead

    @property
    def step(self) -> float:
        """The seconds by which the wall clock has stepped since the last ``move``; 0.0 where it has not."""
        difference = self._wall() - self.now()
        return difference if abs(difference) >= STEP_SECONDS else 0.0

    def move(self, seconds: float) -> None:
        """Move the clock; every deadline by it must be moved as well."""
        self._ahead += seconds

    def reading(self) -> ClockReading:
        """Return what another daemon needs to continue this clock."""
        elapsed = self._elapsed()
        return ClockReading(self._boot(), elapsed, elapsed + self._ahead)

    def resume(self, last: ClockReading) -> float:
        """Continue the clock of an earlier daemon; return the seconds between the two that nothing has measured.

        After a boot the time that has passed is what the wall clock says, and no less than none: only a clock that was
        set back is recognised.
        """
        if last.boot == self._boot() and last.elapsed <= self._elapsed():
            self._ahead = last.at - last.elapsed
            return 0.0
        unmeasured = self._wall() - last.at
        self._ahead = max(self._wall(), last.at) - self._elapsed()
        return max(0.0, unmeasured)


CLOCK: Final = SteadyClock()
"""The clock of this process."""


def now() -> float:
    """Return the time by the clock of this process, in seconds since the epoch."""
    return CLOCK.now()
