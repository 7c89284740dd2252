"""Forecasts when waiting jobs start, by simulating the scheduler's own decisions. Pure.

Running jobs end when they are expected to (``durations.py``), stopped ones at once. After each end ``decide`` makes the
next decisions, and the jobs that it starts run for as long as expected. A job of which nothing is known never ends, so
the jobs that wait for it have no estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core import events as ev
from orchestrator.core.errors import CoreError
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.scheduler.live_jobs import LiveJobs
from orchestrator.core.scheduler.placement import nodes_at, rank_size
from orchestrator.core.scheduler.preemption import REPEATED_SECONDS, Preemption, PreemptionPlan, loss
from orchestrator.core.scheduler.scheduler import decide, expected_ends, indexed, order_of
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.durations import RunTimes, TimeLeft
    from orchestrator.core.scheduler.order import Rule
    from orchestrator.core.scheduler.scheduler import State

MAX_DECISIONS: Final = 300
MAX_WAITING: Final = 300
"""Maximum number of simulated waiting jobs, the first of the queue; a job behind them has no estimate."""
_AT_ONE_TIME: Final = 50


class Holder(NamedTuple):
    """A job that has GPUs, its expected end (None: not known), the forecast of it, and the forecast's usual error."""

    job: Job
    ends_at: float | None
    left: TimeLeft | None
    error: float | None


class RegularSaves:
    """Times at which jobs save if each goes on as regularly as between its last two checkpoints on storage."""

    def saved_at(self, job: Job, now: float) -> float | None:
        """Return when its newest checkpoint was saved."""
        began, every = self._began(job), job.checkpoints.durable_every
        passed = 0.0 if every is None else (now - began) // every * every
        return began + passed if passed > 0 else job.checkpoints.durable_at

    def next_at(self, job: Job, now: float) -> float | None:
        """Return when its next one is saved."""
        began, every = self._began(job), job.checkpoints.durable_every
        return None if every is None else began + ((now - began) // every + 1) * every

    @staticmethod
    def _began(job: Job) -> float:
        began = job.attempts[-1].running_at if job.attempts else None
        return max(began or 0.0, job.checkpoints.durable_at or 0.0)


class Victim(NamedTuple):
    """A job that a preemption would stop, and the GPU seconds that it would repeat at most."""

    job: Job
    gpu_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Forecast for a waiting job: its expected start, and what has to happen before.

    ``starts_at`` is None if the job is not among those that are simulated, or if a job of which nothing is known has to
    end first. ``ahead`` are the jobs before it, and ``rule`` is why the last of these precedes it. ``holders`` are the
    jobs that have to end, in order; ``stops`` are those that would be stopped for it if it were the first to find too
    little free.
    """

    starts_at: float | None = None
    ahead: tuple[JobId, ...] = ()
    rule: Rule | None = None
    holders: tuple[Holder, ...] = ()
    stops: tuple[Victim, ...] = ()


def front_of(state: State, now: float) -> tuple[State, tuple[JobId, ...]]:
    """Return the state with only the jobs that a forecast simulates, and the ids of the waiting ones, in order.

    The cost of a forecast with it does not depend on the length of the queue. It does not change while the live jobs
    do.
    """
    jobs = indexed(state.jobs)
    waiting = list(islice(order_of(replace(state, jobs=jobs), now)[0], MAX_WAITING))
    apart = {job.id: job for job in (*jobs.active.values(), *waiting)}
    return replace(state, jobs=apart), tuple(job.id for job in waiting)


def expected_starts(state: State, now: float, most: int) -> dict[JobId, float]:
    """Return when the first ``most`` waiting jobs are expected to start, as far as that is known."""
    state = replace(state, jobs=indexed(state.jobs))
    wanted = {job.id for job in islice(order_of(state, now)[0], most)}
    play = _Play(state, now)
    play.run(lambda: wanted <= play.starts.keys())
    return {job_id: at for job_id, at in play.starts.items() if job_id in wanted}


def outlook_of(job_id: JobId, state: State, now: float) -> Outlook:
    """Return the forecast for one waiting job."""
    jobs = indexed(state.jobs)
    state = replace(state, jobs=jobs)
    order, shares = order_of(state, now)
    waiting = list(order)
    place = next((n for n, job in enumerate(waiting) if job.id == job_id), None)
    if place is None:
        return Outlook()
    job = waiting[place]
    nodes = nodes_at(state.nodes, now, state.past.run_times)
    preemption = Preemption(
        jobs, jobs.free(nodes).copy(), nodes, shares, state.past.run_times, now, waiting=order.queues()
    )
    room = preemption.room(job)
    turn = None if room != PreemptionPlan() else preemption.turn(job)
    stops = [(one, loss(one, now)[0]) for one in (*room.stop, *room.later)]
    if turn is not None:
        most = [rank_size(one)[1] * one.num_workers * REPEATED_SECONDS for one in turn.jobs]
        stops = [(one, min(seconds, loss(one, now)[0])) for one, seconds in zip(turn.jobs, most, strict=True)]
    found = Outlook(
        ahead=tuple(one.id for one in waiting[:place]),
        rule=order.rule(waiting[place - 1], job) if place else None,
        stops=tuple(Victim(*stop) for stop in stops),
    )
    if place >= MAX_WAITING:
        return found
    play = _Play(state, now)
    play.run(lambda: job_id in play.starts)
    known = [Holder(*one, state.past.run_times.error(one[0])) for one in play.ended]
    if job_id in play.starts:
        return replace(found, starts_at=play.starts[job_id], holders=tuple(known))
    unknown = [one for one in jobs.holding.values() if one.id not in play.known and rank_size(one)[1] > 0]
    return replace(found, holders=tuple(Holder(one, None, None, None) for one in unknown))


@dataclass(slots=True)
class _Play:
    """Simulates decisions from ``now`` on. Of the jobs that run now, ``ended`` have ended in it, and ``known`` will."""

    state: State
    now: float
    starts: dict[JobId, float] = field(default_factory=dict)
    ended: list[tuple[Job, float, TimeLeft | None]] = field(default_factory=list)
    known: set[JobId] = field(default_factory=set)
    _jobs: LiveJobs = field(default_factory=LiveJobs)
    _ends: list[tuple[float, int, JobId]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = replace(self.state, saves=RegularSaves())
        live = indexed(self.state.jobs)
        waiting = list(islice(order_of(self.state, self.now)[0], MAX_WAITING))
        self._jobs = LiveJobs({job.id: job for job in (*live.active.values(), *waiting)}.values())
        self._ends = [(at, n, job.id) for at, n, job in expected_ends(live, self.now, self._run_times)]
        self.known = {job_id for _, _, job_id in self._ends}
        heapify(self._ends)

    @property
    def _run_times(self) -> RunTimes:
        return self.state.past.run_times

    def run(self, is_over: Callable[[], bool]) -> None:
        """Simulate until ``is_over()``, until nothing more is known, or for ``MAX_DECISIONS`` decisions."""
        at = self.now
        for _ in range(MAX_DECISIONS):
            try:
                wake_at = self._settle(at)
            except CoreError:  # a record that waits for its ranks: what follows from it is not known
                return
            if is_over():
                return
            times = [self._ends[0][0]] if self._ends else []
            times += [wake_at] if wake_at is not None and wake_at > at else []
            if not times:
                return
            at = min(times)
            while self._ends and self._ends[0][0] <= at:
                self._end(heappop(self._ends)[2], at)

    def _settle(self, at: float) -> float | None:
        """Decide until nothing follows; return when to ask again."""
        for _ in range(_AT_ONE_TIME):
            commands = decide(replace(self.state, jobs=self._jobs), at)
            if not commands.events:
                return commands.wake_at
            for event in commands.events:
                self._follow(event, at)
        return None

    def _follow(self, event: ev.Event, at: float) -> None:
        job = fold(self._jobs[event.job_id], event)
        if isinstance(event, ev.AttemptStarted):
            job = fold(job, ev.AttemptRunning(job_id=job.id, at=at, attempt=job.attempt_number, pids=()))
            self.starts.setdefault(job.id, at)
            if (left := self._run_times.left(job, at)) is not None and left.seconds > 0:
                heappush(self._ends, (at + left.seconds, job.submission.sequence, job.id))
        elif isinstance(event, ev.StopRequested) and job.state is JobState.DRAINING:
            job = fold(job, ev.AttemptGone(job_id=job.id, at=at, attempt=job.attempt_number))
            job = fold(job, ev.GangReleased(job_id=job.id, at=at, gang=job.gang))
        if job.state.is_terminal:
            self._jobs.pop(job.id)
        else:
            self._jobs[job.id] = job

    def _end(self, job_id: JobId, at: float) -> None:
        job = self._jobs.get(job_id)
        if job is None or not job.gang_open:
            return  # it was stopped since
        del self._jobs[job_id]
        if job_id in self.known:
            began = indexed(self.state.jobs)[job_id]
            self.ended.append((began, at, self._run_times.left(began, self.now)))
