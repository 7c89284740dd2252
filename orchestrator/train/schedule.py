"""When to save: what ``context().should_save(step)`` answers. The same on every rank of a node.

The setting is ``auto``, a number of steps (``100``), or a time (``30s``). With ``auto`` the interval is chosen anew
after each save from the measured cost of saving and of a step (orchestrator/checkpoint/interval.py).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.checkpoint.interval import IntervalChoice, choose_interval

if TYPE_CHECKING:
    from orchestrator.train.board import Board

_SETTING = re.compile(r"(\d+)|(\d+(?:\.\d+)?)s")
_STEP_WEIGHT = 0.2  # of the newest measurement in the running estimates
_SAVE_WEIGHT = 0.5  # the first save also allocates; a few later ones must outweigh it


class IntervalSettingError(ValueError):
    """The interval is none of ``auto``, a number of steps (``100``) and a time (``30s``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSetting:
    """Either a number of steps, or a time in seconds, or neither: automatic."""

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
    """Decides for one rank. ``board`` None: for itself alone."""

    def __init__(
        self,
        setting: IntervalSetting,
        *,
        rank: int,
        board: Board | None,
        recovery_seconds: float,
        failure_seconds: float,
    ) -> None:
        self._setting, self._rank, self._board = setting, rank, board
        self._recovery, self._failure = recovery_seconds, failure_seconds
        self._next: int | None = None
        self._answered = -1  # the last step that was answered with yes
        self._last: tuple[int, float] | None = None
        self._saving = 0.0  # seconds spent in saves since the last call
        self._step_seconds: float | None = None
        self._save_seconds: float | None = None
        self.choice: IntervalChoice | None = None

    def saved(self, seconds: float) -> None:
        """A save has stalled the loop for that long."""
        old = self._save_seconds
        self._save_seconds = seconds if old is None else old + _SAVE_WEIGHT * (seconds - old)
        self._saving += seconds

    def is_due(self, step: int) -> bool:
        """Whether to save at ``step``. Ask once per step, on every rank."""
        self._measure(step)
        if step <= self._answered:
            return False
        board = None if self._rank == 0 else self._board
        due = self._decide(step) if board is None else board.saves_at(step)
        if due:
            self._answered = step
        return due

    def _decide(self, step: int) -> bool:
        if self._next is None:
            # The other ranks may have asked about this step already: they all begin with the next one.
            self._next = step if self._board is None else step + 1
            if self._board is not None:
                self._board.publish_save(last=None, upcoming=self._next)
        if step < self._next:
            return False
        self._next = step + self._steps()
        if self._board is not None:
            self._board.publish_save(last=step, upcoming=self._next)
        return True

    def _steps(self) -> int:
        if self._setting.steps is not None:
            return self._setting.steps
        if self._step_seconds is None:
            return 1  # nothing is known yet: look again at the next step
        if self._setting.seconds is not None:
            return max(1, round(self._setting.seconds / self._step_seconds)) if self._step_seconds else 1
        if self._save_seconds is None:
            return 1
        self.choice = choose_interval(
            save_seconds=self._save_seconds,
            step_seconds=self._step_seconds,
            recovery_seconds=self._recovery,
            failure_seconds=self._failure,
        )
        return self.choice.steps

    def _measure(self, step: int) -> None:
        now = time.perf_counter()
        if self._last is not None and step > self._last[0]:
            seconds = max(0.0, (now - self._last[1] - self._saving) / (step - self._last[0]))
            old = self._step_seconds
            self._step_seconds = seconds if old is None else old + _STEP_WEIGHT * (seconds - old)
        self._last, self._saving = (step, now), 0.0
