"""The newest steps of one rank as samples: one per moment at which it had made steps, however many. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from orchestrator.core import thresholds as d
from orchestrator.core.diagnosis.figures.estimate import estimate
from orchestrator.core.diagnosis.pace import APART

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.diagnosis.figures.estimate import Estimate
    from orchestrator.core.diagnosis.observation import RankSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """A rank over the window: the seconds of a step, its own work in them, and its wait for the next batch."""

    rank: int
    node: str
    step: Estimate
    own: Estimate | None
    data_seconds: float | None


def in_lockstep(ranks: Sequence[RankFigures]) -> bool:
    """Whether the steps of all ranks take the same time: then they meet in a collective at every step. True where no rank reports steps."""
    steps = [rank.step.value for rank in ranks]
    return not steps or max(steps) <= d.LOCKSTEP * min(steps)


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    step_seconds: float
    parts_seconds: float | None
    data_seconds: float | None
    busy_seconds: float | None


class RankWindow:
    """The window of one rank."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._steps = 0

    def add(self, clock: float, seen: RankSeen) -> None:
        """Add the rank's report, where it has made steps since the last one."""
        made, self._steps = seen.steps - self._steps, seen.steps
        if made <= 0 or not seen.step_seconds:
            return
        parts = [value for name in APART if (value := seen.parts.get(name)) is not None]
        self._samples.append(
            _Sample(
                at=clock,
                step_seconds=median(seen.step_seconds[-made:]),
                parts_seconds=sum(parts) if parts else None,
                data_seconds=seen.parts.get("data_seconds"),
                busy_seconds=seen.busy_seconds,
            )
        )

    def expire(self, clock: float) -> None:
        """Drop samples that are older than the longest window, except the last few."""
        while len(self._samples) > d.LEAST_STEPS and self._samples[0].at <= clock - d.LONG_WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def whole(self) -> bool:
        """Whether there are enough samples for a figure."""
        return len(self._samples) >= d.LEAST_STEPS

    @property
    def has_parts(self) -> bool:
        """Whether the rank reports the parts of its steps."""
        return bool(self._samples) and self._samples[-1].parts_seconds is not None

    def figures(self, rank: RankSeen, since: float, *, parts: bool, busy: bool, work: float | None) -> RankFigures:
        """Return the figures of the samples after ``since``, or the last few. Own work is from ``parts``, else processor time (``busy``).

        ``work`` is the share of time in which the rank worked, by its GPU, where nothing else shows it.
        """
        samples = [sample for sample in self._samples if sample.at > since]
        if len(samples) < d.LEAST_STEPS:
            samples = list(self._samples)[-d.LEAST_STEPS :]
        steps = [sample.step_seconds for sample in samples]
        data = [sample.data_seconds for sample in samples if sample.data_seconds is not None]
        own: list[float] = []
        if parts:
            own = [sample.parts_seconds for sample in samples if sample.parts_seconds is not None]
        elif busy:
            own = [sample.busy_seconds for sample in samples if sample.busy_seconds is not None]
            own = own or ([step * work for step in steps] if work is not None else [])
        return RankFigures(
            rank=rank.rank,
            node=rank.node,
            step=estimate(steps),
            own=estimate(own) if len(own) >= d.LEAST_STEPS else None,
            data_seconds=median(data) if data else None,
        )
