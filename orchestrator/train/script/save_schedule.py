"""Decides when to save: the answer of ``context().should_save(step)``. The same on every rank of a node.

The setting is ``auto``, a number of steps (``100``), or a time (``30s``). With ``auto`` the time between saves is
chosen again after each save: the interval that loses the least time. The schedule is by clock, not by a predicted number of steps:
steps may become slower or faster.

Frequent saves cost their own time; rare ones cost the steps since the last save. With a save of Ts, a recovery
of Tr, and a mean time Tf between failures, the share of time that moves training forward is greatest when
saves start every Ts + sqrt(2 (Tf + Tr) Ts + Ts^2) (arXiv 2410.18124; for small Ts this is Young's sqrt(2 Tf Ts)).
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.units import duration

if TYPE_CHECKING:
    from orchestrator.train.script.agreement import ShmAgreement

_SETTING = re.compile(r"(\d+)|(\d+(?:\.\d+)?)s")
_STEP_WEIGHT = 0.2  # weight of the newest measurement in a running mean
_COST_WEIGHT = 0.5


class IntervalSettingError(ValueError):
    """The interval is not one of ``auto``, a number of steps (``100``) and a time (``30s``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSetting:
    """A number of steps, a time in seconds, or neither: automatic."""

    steps: int | None = None
    seconds: float | None = None


AUTO = IntervalSetting()


def parse_interval(text: str) -> IntervalSetting:
    """Read ``auto``, ``100`` or ``30s``. Raises IntervalSettingError."""
    if text in ("", "auto"):
        return AUTO
    match = _SETTING.fullmatch(text)
    if match is None or float(match[1] or match[2]) == 0:
        raise IntervalSettingError(
            f"interval {text!r}: use 'auto', a number of steps such as 100, or a time such as 30s"
        )
    return IntervalSetting(steps=int(match[1])) if match[1] else IntervalSetting(seconds=float(match[2]))


class SaveSchedule:
    """Decides for one rank. ``board`` None: independently; else rank 0 decides, one step ahead, and all follow."""

    def __init__(
        self,
        setting: IntervalSetting,
        *,
        rank: int,
        board: ShmAgreement | None,
        recovery_seconds: float,
        failure_seconds: float,
    ) -> None:
        self._setting, self._rank, self._board = setting, rank, board
        self._recovery, self._failure = recovery_seconds, failure_seconds
        self._answered = -1  # the last step with the answer yes
        self._began: float | None = None  # its time
        self._due_at: int | None = None  # the step of the next save, once known
        self._last: tuple[int, float] | None = None
        self._stalled = 0.0  # seconds spent in saves since the last call
        self._step_seconds: float | None = None
        self._cost: float | None = None
        self.choice: IntervalChoice | None = None

    def saved(self, *, stall_seconds: float, cost_seconds: float) -> None:
        """Record a save that stalled the loop, and its cost when it is not the first of its kind."""
        old = self._cost
        self._cost = cost_seconds if old is None else old + _COST_WEIGHT * (cost_seconds - old)
        self._stalled += stall_seconds

    def is_due(self, step: int) -> bool:
        """Whether to save at ``step``. Call once per step, on every rank."""
        now = time.perf_counter()
        self._measure(step, now)
        if step <= self._answered:
            return False
        board = None if self._rank == 0 else self._board
        due = self._decide(step, now) if board is None else board.saves_at(step)
        if due:
            self._answered = step
        return due

    def _decide(self, step: int, now: float) -> bool:
        ahead = 0 if self._board is None else 1  # other ranks may already have called this for the step
        if self._due_at is None and self._is_time(now, ahead):
            self._due_at = step + ahead
            if self._board is not None:
                self._board.publish_save(last=self._answered, upcoming=self._due_at)
        if self._due_at is None or step < self._due_at:
            return False
        self._began = now
        self._due_at = self._next_step(step)
        if self._board is not None:
            self._board.publish_save(last=step, upcoming=self._due_at)
        return True

    def _is_time(self, now: float, ahead: int) -> bool:
        if self._began is None:
            return True  # a first save measures the cost
        seconds = self._interval()
        # The save is `ahead` steps from now; half a step earlier or later is the precision of whole steps.
        return seconds is not None and now - self._began + (ahead + 0.5) * (self._step_seconds or 0.0) >= seconds

    def _next_step(self, step: int) -> int | None:
        """Return the step of the next save if already known: then all ranks can save at every step."""
        if self._setting.steps is not None:
            return step + self._setting.steps
        seconds = self._interval()
        every_step = seconds is not None and self._step_seconds is not None and seconds < 1.5 * self._step_seconds
        return step + 1 if every_step else None

    def _interval(self) -> float | None:
        if self._setting.seconds is not None or self._cost is None:
            return self._setting.seconds
        self.choice = choose_interval(
            save_seconds=self._cost,
            step_seconds=self._step_seconds or 0.0,
            recovery_seconds=self._recovery,
            failure_seconds=self._failure,
        )
        return self.choice.seconds

    def _measure(self, step: int, now: float) -> None:
        if self._last is not None and step > self._last[0]:
            seconds = max(0.0, (now - self._last[1] - self._stalled) / (step - self._last[0]))
            old = self._step_seconds
            self._step_seconds = seconds if old is None else old + _STEP_WEIGHT * (seconds - old)
        self._last, self._stalled = (step, now), 0.0


PRIOR_FAILURE_SECONDS = 4 * 3600.0  # assumed for a job that has not failed yet
DEFAULT_RECOVERY_SECONDS = 1.0
_SHORTEST_STEP_SECONDS = 1e-6
CHEAP_SHARE = 0.005  # of the time: cheaper saves are made even if failures seem rarer
LONGEST_SECONDS = 600.0  # a wrong estimate costs at most ten minutes of work


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChoice:
    """A chosen interval: in seconds, in whole steps of the present length, and as a sentence."""

    seconds: float
    steps: int
    reason: str


def optimal_interval(*, save_seconds: float, recovery_seconds: float, failure_seconds: float) -> float:
    """Return the seconds between the starts of two saves that keep the most time productive.

    ``save_seconds`` is how long a save stalls training, ``recovery_seconds`` how long it takes from a failure to the
    next step, ``failure_seconds`` the mean time between failures. Raises ValueError for invalid durations.
    """
    if not (save_seconds >= 0 and recovery_seconds >= 0 and failure_seconds > 0):
        raise ValueError(
            f"invalid durations: save {save_seconds}, recovery {recovery_seconds}, failure {failure_seconds}"
        )
    return save_seconds + math.sqrt(2 * (failure_seconds + recovery_seconds) * save_seconds + save_seconds**2)


def choose_interval(
    *, save_seconds: float, step_seconds: float, recovery_seconds: float, failure_seconds: float
) -> IntervalChoice:
    """Return the best interval, with a sentence for users. A ``step_seconds`` of 0 means unknown.

    The failure rate is the least known input: a job that fails every minute has no history before its first failure. So
    the interval is never longer than that at which saves take ``CHEAP_SHARE`` of the time. Writes to storage have their
    own pace and do not become more frequent.
    """
    best = optimal_interval(
        save_seconds=save_seconds, recovery_seconds=recovery_seconds, failure_seconds=failure_seconds
    )
    cheap = save_seconds / CHEAP_SHARE
    seconds = min(best, cheap, LONGEST_SECONDS)
    steps = max(1, round(seconds / max(step_seconds, _SHORTEST_STEP_SECONDS)))
    reason = (
        f"every {'step' if steps == 1 else f'{steps} steps'} ({duration(steps * step_seconds)}): a save takes {duration(save_seconds)}, a step"
        f" {duration(step_seconds)}, a recovery {duration(recovery_seconds)}, failures are expected every"
        f" {duration(failure_seconds)}"
        + (
            f"; saves that take {CHEAP_SHARE:.1%} of the time are made anyway, as the failure rate is an estimate"
            if cheap < best
            else ""
        )
    )
    return IntervalChoice(seconds=seconds, steps=steps, reason=reason)
