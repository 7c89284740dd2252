"""Figures of a rank's processes over a window, for scripts that report nothing and values that no script reports. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.core import thresholds as d
from orchestrator.core.diagnosis.figures.estimate import estimate, share
from orchestrator.core.diagnosis.figures.growth import GrowthWindow

if TYPE_CHECKING:
    from orchestrator.core.diagnosis.figures.estimate import Estimate
    from orchestrator.core.diagnosis.figures.growth import Growth
    from orchestrator.core.diagnosis.observation import ProcessSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """One rank: processors used, and the shares of looks in which its training thread waited. None where too little is known.

    ``asleep`` and ``locked`` are those of ``ProcessSeen``.
    """

    newest: ProcessSeen
    busy: Estimate | None = None
    asleep: float | None = None
    locked: Estimate | None = None
    growth: Growth | None = None
    fast_growth: Growth | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    at: float
    busy: float
    looks: int
    asleep: int
    locked: int


class ProcessWindow:
    """The window of one rank."""

    def __init__(self) -> None:
        self._spans: deque[_Span] = deque()
        self._before: ProcessSeen | None = None
        self._slow = GrowthWindow()
        self._fast = GrowthWindow(d.FAST_SLOTS, d.FAST_SLOT_SECONDS)

    def add(self, clock: float, seen: ProcessSeen, *, comparable: bool) -> None:
        """Add an observation. Time in which ranks cannot be compared is no evidence of what they wait for."""
        before, self._before = self._before, seen if comparable else None
        self._slow.add(clock, seen.resident_bytes)
        self._fast.add(clock, seen.resident_bytes)
        if before is not None and seen.at > before.at and seen.looks >= before.looks:
            self._spans.append(
                _Span(
                    at=clock,
                    busy=max(0.0, seen.cpu_seconds - before.cpu_seconds) / (seen.at - before.at),
                    looks=seen.looks - before.looks,
                    asleep=seen.asleep - before.asleep,
                    locked=seen.locked - before.locked,
                )
            )
        while self._spans and self._spans[0].at <= clock - d.PROCESS_WINDOW_SECONDS:
            self._spans.popleft()

    def figures(self, newest: ProcessSeen) -> ProcessFigures:
        """Return the figures of the window."""
        looks = sum(span.looks for span in self._spans)
        known = looks >= d.LEAST_LOOKS
        busy = [span.busy for span in self._spans]
        return ProcessFigures(
            newest=newest,
            busy=estimate(busy) if len(busy) >= d.LEAST_STEPS else None,
            asleep=sum(span.asleep for span in self._spans) / looks if known else None,
            locked=share(sum(span.locked for span in self._spans), looks) if known else None,
            growth=self._slow.growth(),
            fast_growth=self._fast.growth(),
        )
