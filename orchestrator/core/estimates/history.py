"""History of what a job has reported, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_MARKS: Final = 512
SPACING_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Mark:
    """By ``at`` (Unix time) the attempt had done ``step`` steps, and was in ``phase`` from then on."""

    at: float
    attempt: int
    step: int
    phase: str = ""


class StepHistory:
    """At most ``most`` marks of a job. If there are more, every second goes, and later ones are kept half as often."""

    __slots__ = ("_marks", "_most", "_spacing")

    def __init__(self, most: int = MOST_MARKS, spacing: float = SPACING_SECONDS) -> None:
        self._most = most
        self._spacing = spacing
        self._marks: list[Mark] = []

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The marks, the oldest first."""
        return tuple(self._marks)

    def add(self, mark: Mark) -> bool:
        """Keep a mark that adds something new; return whether it was kept."""
        last = self._marks[-1] if self._marks else None
        if last is not None and last.attempt == mark.attempt:
            if mark.step == last.step and mark.phase != last.phase and mark.at - last.at < self._spacing:
                self._marks[-1] = Mark(last.at, last.attempt, last.step, mark.phase)
                return True
            if mark.at - last.at < self._spacing or (mark.step == last.step and mark.phase == last.phase):
                return False
        elif last is not None and mark.attempt < last.attempt:
            return False
        self._marks.append(mark)
        if len(self._marks) > self._most:
            self._thin()
        return True

    def _thin(self) -> None:
        """Drop every second mark, except the newest and the first of each attempt."""
        self._spacing *= 2
        marks = self._marks
        kept = [
            marks[place]
            for place in range(len(marks) - 1)
            if place % 2 == 0 or marks[place].attempt != marks[place - 1].attempt
        ]
        self._marks = [*kept, marks[-1]][-self._most :]
