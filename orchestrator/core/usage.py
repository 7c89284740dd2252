"""Computes a job's use in a span of time from its stored events: GPU time by phase, and GPU time that it waited for. Pure.

The events are replayed through the goodput ledger, so the same events give the same figures in every daemon. Training
time is productive when a checkpoint covers it or the job succeeds; time that is undecided at the end of the span is
``uncommitted``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from orchestrator.core.goodput import GoodputLedger, Phase
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.events import Event
    from orchestrator.core.job.record import Job

UNCOMMITTED: Final = "uncommitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """GPU seconds; ``phases`` and ``uncommitted`` add up to ``held``. ``waited`` is the time in the queue times the requested GPUs."""

    held: float = 0.0
    waited: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_nothing(self) -> bool:
        """Whether the job neither held nor waited for a GPU."""
        return not self.held and not self.waited


class _Watched:
    """One job's ledger and time in the queue, read at the start and the end of the span."""

    def __init__(self) -> None:
        self._ledger = GoodputLedger()
        self._waited = 0.0
        self._clock: float | None = None
        self._asked = 0.0
        self._waits = False

    def observe(self, job: Job, event: Event) -> None:
        self._ledger.observe(job, event)
        self._accrue(event.at)
        self._waits = job.state is JobState.PENDING
        self._asked = job.size.least * job.spec.resources.resources_per_worker.gpu

    def _accrue(self, at: float) -> None:
        if self._clock is None or at > self._clock:
            self._waited += (at - self._clock) * self._asked if self._waits and self._clock is not None else 0.0
            self._clock = at

    def read(self, at: float) -> Use:
        self._accrue(at)
        reading = self._ledger.read(at)
        phases = {phase.value: 0.0 for phase in Phase}
        for totals in reading.jobs.values():
            phases = {phase.value: totals[phase] for phase in Phase}
        phases[UNCOMMITTED] = sum(reading.uncommitted.values())
        return Use(held=reading.held, waited=self._waited, phases=phases)


def use_between(records: Iterable[tuple[Job, Event]], since: float, until: float) -> Use:
    """Return what one job used between two wall times; ``records`` are all its events, each with the record after it."""
    watched = _Watched()
    before: Use | None = None
    for job, event in records:
        if event.at >= until:
            break
        if before is None and event.at >= since:
            before = watched.read(since)
        watched.observe(job, event)
    if before is None:
        before = watched.read(since)
    after = watched.read(until)
    return _difference(before, after)


_OPEN_BECOMES: Final = (Phase.PRODUCTIVE.value, Phase.LOST.value)
_ALSO: Final = (Phase.STARTING.value, Phase.RECOVERING.value, Phase.CHECKPOINT_STALL.value)


def _difference(before: Use, after: Use) -> Use:
    """Return the difference. Time uncommitted before the span and settled in it, oldest first, counts before the span."""
    held = max(0.0, after.held - before.held)
    grown = {name: max(0.0, after.phases[name] - before.phases[name]) for name in after.phases if name != UNCOMMITTED}
    settled = min(before.phases[UNCOMMITTED], sum(grown[name] for name in _OPEN_BECOMES))
    _take(grown, settled, _OPEN_BECOMES)
    _take(grown, max(0.0, sum(grown.values()) - held), (*_ALSO, *_OPEN_BECOMES))
    grown[UNCOMMITTED] = max(0.0, held - sum(grown.values()))
    return Use(held=held, waited=max(0.0, after.waited - before.waited), phases=grown)


def _take(phases: dict[str, float], amount: float, names: tuple[str, ...]) -> None:
    for name in names:
        taken = min(amount, phases[name])
        phases[name] -= taken
        amount -= taken
