"""The goodput ledger: how the GPU time that jobs held was used, in GPU seconds.

While a job holds a gang, its clock runs, and every second of it ends in exactly one phase, so that the phases and the
open time always add up to the GPU time held. Training time is open at first: it becomes *productive* when a checkpoint
covers its steps or the job succeeds, and *lost* when the job continues without them. Nothing is ever moved out of a
phase again, so phases can be exported as counters.

- `starting`: from the order for a gang to the first step; `recovering`: the same after a failure, with the decision.
- `checkpoint_stall`: the training loop stood still to save. `draining`: stopping, saving for the last time, releasing.

Before an attempt's first report it is unknown whether its script reports steps at all. That time is open too, and is
assigned when the first report arrives, or when the attempt ends without one.

This module receives records and times and reads no clock. It must not decide anything about a job.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from orchestrator.core import events as ev
from orchestrator.core.states import AttemptState, JobState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job

MAX_MARKS = 512
"""How many (step, time) pairs are kept between two checkpoints; beyond, every other one is dropped."""


class Phase(StrEnum):
    """Use of GPU time."""

    STARTING = "starting"
    PRODUCTIVE = "productive"
    LOST = "lost"
    CHECKPOINT_STALL = "checkpoint_stall"
    RECOVERING = "recovering"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The ledger at a moment, in GPU seconds. `held` is all GPU time held: the phases and what is uncommitted."""

    phases: Mapping[tuple[str, Phase], float]
    uncommitted: Mapping[str, float]
    jobs: Mapping[JobId, Mapping[Phase, float]]
    held: float


@dataclass(slots=True)
class _Account:
    """One job's time. `phase` None while it holds a gang means training: its time is open."""

    queue: str
    clock: float
    gpus: float = 0.0
    holding: bool = False
    phase: Phase | None = None
    attempt: int = 0
    warm_up: Phase = Phase.STARTING
    reported: bool = False
    saves: int = 0
    open: float = 0.0
    held: float = 0.0
    totals: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    marks: list[tuple[int, float]] = field(default_factory=list)

    def accrue(self, at: float) -> None:
        """Advance the clock to `at`; an earlier time changes nothing."""
        spent = max(0.0, at - self.clock) * self.gpus if self.holding else 0.0
        self.clock = max(self.clock, at)
        self.held += spent
        if self.phase is None:
            self.open += spent
        else:
            self.totals[self.phase] += spent

    def give(self, phase: Phase, amount: float) -> None:
        """Assign an amount of open time to a phase."""
        amount = min(max(0.0, amount), self.open)
        self.open -= amount
        self.totals[phase] += amount

    def settle(self, phase: Phase) -> None:
        """Assign all open time to this phase."""
        self.give(phase, self.open)
        self.marks.clear()

    def mark(self, step: int) -> None:
        """Record that step `step` was done by now."""
        if self.marks and step <= self.marks[-1][0]:
            return
        self.marks.append((step, self.open))
        if len(self.marks) > MAX_MARKS:
            del self.marks[1:-1:2]

    def covered_by(self, step: int) -> float:
        """Return how much of the open time the steps up to `step` took."""
        if not self.marks or step >= self.marks[-1][0]:
            return self.open
        before = (self.marks[0][0], self.marks[0][1])
        if step <= before[0]:
            return before[1] if step == before[0] else 0.0
        for after in self.marks[1:]:
            if step <= after[0]:
                share = (step - before[0]) / (after[0] - before[0])
                return before[1] + share * (after[1] - before[1])
            before = after
        return self.open

    def commit(self, step: int) -> None:
        """Record that a checkpoint covers the steps up to `step`."""
        amount = self.covered_by(step)
        self.give(Phase.PRODUCTIVE, amount)
        self.marks = [(number, max(0.0, at - amount)) for number, at in self.marks if number > step]

    def stall(self, amount: float) -> None:
        """Record that the newest `amount` of open time was spent on saving."""
        self.give(Phase.CHECKPOINT_STALL, amount)
        self.marks = [(number, min(at, self.open)) for number, at in self.marks]


class GoodputLedger:
    """The accounts of all jobs. Times are wall times, in any order."""

    def __init__(self) -> None:
        self._accounts: dict[JobId, _Account] = {}
        self._closed: dict[tuple[str, Phase], float] = {}
        self._closed_held = 0.0

    def observe(self, job: Job, event: ev.Event) -> None:
        """Record a folded event: `job` is the record after it. Replaying a job's events rebuilds its account."""
        account = self._accounts.get(job.id)
        if account is None:
            if not job.gang_open:
                return
            account = self._accounts[job.id] = _Account(queue=job.spec.queue, clock=event.at)
        account.accrue(_when(event))
        if isinstance(event, ev.CheckpointSaved) and event.attempt == account.attempt:
            account.commit(event.step)
        if isinstance(event, ev.FirstStep) and event.attempt == account.attempt:
            _report(account, event.step)
        if job.attempt_number != account.attempt:
            _begin_attempt(account, job)
        if job.succeeded or job.state is JobState.SUCCEEDED:
            account.settle(Phase.PRODUCTIVE)
        elif job.state not in _OPEN_STATES:
            account.settle(Phase.LOST)
        account.holding = job.gang_open
        account.phase = _phase(account, job)

    def progress(
        self, job_id: JobId, *, attempt: int, step: int, at: float, saves: int = 0, save_seconds: float | None = None
    ) -> None:
        """Record that rank 0 of `attempt` reported `step` at `at`.

        `saves` counts how often its loop has stood still to save and `save_seconds` is the duration of the last time;
        both as in the progress page. A report of another attempt, or of a job that holds nothing, changes nothing.
        """
        account = self._accounts.get(job_id)
        if account is None or attempt != account.attempt or account.phase is not None or not account.holding:
            return
        account.accrue(at)
        _report(account, step)
        if saves > account.saves and save_seconds:
            account.stall((saves - account.saves) * save_seconds * account.gpus)
        account.saves = max(saves, account.saves)

    def read(self, now: float) -> Reading:
        """Return the ledger at `now`. Clocks advance to it, so that a later reading is never smaller."""
        phases = dict(self._closed)
        uncommitted: dict[str, float] = {}
        held = self._closed_held
        for account in self._accounts.values():
            account.accrue(now)
            held += account.held
            uncommitted[account.queue] = uncommitted.get(account.queue, 0.0) + account.open
            _add(phases, account)
        jobs = {job_id: dict(account.totals) for job_id, account in self._accounts.items()}
        return Reading(phases=phases, uncommitted=uncommitted, jobs=jobs, held=held)

    def forget(self, job_id: JobId) -> None:
        """Keep only a job's share of its queue's totals. A job that still holds a gang is kept."""
        account = self._accounts.get(job_id)
        if account is None or account.holding:
            return
        del self._accounts[job_id]
        account.settle(Phase.LOST)
        _add(self._closed, account)
        self._closed_held += account.held


# In RECOVERING too: the actor of a dead rank may still save what it holds in memory.
_OPEN_STATES = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RECOVERING, JobState.DRAINING})


def _when(event: ev.Event) -> float:
    return event.failed_at if isinstance(event, ev.AttemptFailed) else event.at


def _report(account: _Account, step: int) -> None:
    if not account.reported:
        account.reported = True
        account.give(account.warm_up, account.open)
    account.mark(step)


def _begin_attempt(account: _Account, job: Job) -> None:
    account.settle(Phase.LOST)
    account.attempt = job.attempt_number
    account.reported = False
    account.saves = 0
    account.gpus = len(job.nodes) * job.spec.resources.resources_per_worker.gpu
    before = job.attempts[-2].state if len(job.attempts) > 1 else None
    failed = before in (AttemptState.FAILED, AttemptState.LOST)
    account.warm_up = Phase.RECOVERING if failed else Phase.STARTING


def _phase(account: _Account, job: Job) -> Phase | None:
    if job.succeeded:
        return Phase.DRAINING
    match job.state:
        case JobState.STARTING:
            return account.warm_up
        case JobState.RUNNING:
            return None
        case JobState.RECOVERING:
            return Phase.RECOVERING
        case _:
            return Phase.DRAINING


def _add(phases: dict[tuple[str, Phase], float], account: _Account) -> None:
    for phase, amount in account.totals.items():
        key = (account.queue, phase)
        phases[key] = phases.get(key, 0.0) + amount


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
