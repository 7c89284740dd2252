"""Tracks the use of a rank: an interactive one is in use or idle, another one may wait at a breakpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

UNATTENDED_SECONDS: Final = 600.0
"""Time that a rank waits at a breakpoint with no client attached before its debugger's input ends."""
BUSY_SHARE: Final = 0.05
"""Processes that use this share of a core or more are not idle."""


class Use:
    """Time of a rank's last use. ``clock`` gives monotonic seconds."""

    def __init__(self, limit_seconds: float, clock: Callable[[], float]) -> None:
        self._limit_seconds, self._clock = limit_seconds, clock
        self._used_at = clock()
        self._cpu: tuple[float, float] | None = None

    def note(self) -> None:
        """Record a use now: something was typed or printed, here or in a session beside the rank."""
        self._used_at = self._clock()

    def is_idle(self, cpu_seconds: float | None) -> bool:
        """Whether the rank was not used for the limit. ``cpu_seconds``: CPU time of its processes so far, if known."""
        now = self._clock()
        if cpu_seconds is not None and (self._cpu is None or cpu_seconds != self._cpu[0]):
            if self._cpu is None or cpu_seconds - self._cpu[0] >= BUSY_SHARE * (now - self._cpu[1]):
                self._used_at = now
            self._cpu = (cpu_seconds, now)
        return now - self._used_at >= self._limit_seconds


class Breakpoint:
    """Time at which a rank stopped at a breakpoint (``stopped_at``, wall time; None: at none), and time without a client."""

    def __init__(self, limit_seconds: float, clock: Callable[[], float]) -> None:
        self._limit_seconds, self._clock = limit_seconds, clock
        self._unattended_since = clock()
        self.stopped_at: float | None = None

    def left(self) -> None:
        """Record that a client has detached."""
        self._unattended_since = self._clock()

    def is_abandoned(self, *, at_prompt: bool, attended: bool, now: float) -> bool:
        """Record the state at wall time ``now``; return whether the rank has waited for a client for the limit.

        After that, it returns True again only when the limit has passed once more.
        """
        clock = self._clock()
        if not at_prompt:
            self.stopped_at = None
            return False
        if self.stopped_at is None:
            self.stopped_at, self._unattended_since = now, clock
        if attended:
            self._unattended_since = clock
        if clock - self._unattended_since < self._limit_seconds:
            return False
        self._unattended_since = clock
        return True
