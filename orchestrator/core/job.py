"""A job as the fold of its events.

``fold`` is the only way a job's record changes; the store's rows are this record, written in the same transaction
as the event. Facts may arrive twice (a restarted daemon asks the actors again): folding one again changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from orchestrator.core import events as ev
from orchestrator.core.errors import BrokenRuleError, CoreError
from orchestrator.core.job_checkpoints import checkpoint_saved
from orchestrator.core.past_attempts import Past, shorten
from orchestrator.core.states import AttemptState, FailureClass, JobState, StopPurpose, StopScope, check_transition
from orchestrator.spec.job import ElasticWorkers, JobSpec, from_dict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.ids import JobId

STORY_LENGTH = 12
MAX_WORKERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How one rank of the current attempt ended."""

    rank: int
    exit_code: int | None
    signal: int | None
    at: float
    error_type: str = ""
    error_message: str = ""
    error_at: float | None = None
    log_tail: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    policy: str = ""
    policy_note: str = ""
    missing_file: str = ""
    left_out_by: str = ""
    stop_seen_at: float | None = None
    stop_scope: StopScope | None = None
    last_step: int | None = None
    total_steps: int | None = None
    memory: ev.MemoryUse | None = None

    @property
    def ok(self) -> bool:
        """The rank ended with exit code 0."""
        return self.exit_code == 0

    @property
    def failed_at(self) -> float:
        """When the failure began: the exception if there was one, else the death."""
        return self.error_at if self.error_at is not None else self.at

    @property
    def finished(self) -> bool:
        """The rank had reported its last step."""
        return self.last_step is not None and self.total_steps is not None and self.last_step >= self.total_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt, current or past. ``ranks`` is its size: that of an elastic job may change between attempts.

    ``progressed``: it has saved a checkpoint that is newer than the one that it began with.
    """

    number: int
    gang: int
    state: AttemptState
    started_at: float
    running_at: float | None = None
    ended_at: float | None = None
    first_step_at: float | None = None
    first_step: int | None = None
    steps_lost: int = 0
    start_step: int = 0
    checkpoint_step: int = 0
    failure: ev.Failure | None = None
    ranks: int = 0
    progressed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A requested stop."""

    purpose: StopPurpose
    by: str
    at: float
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job's whole record. ``sequence`` is its place of arrival; ``version`` counts its events.

    ``attempts`` are the last ones, see ``past.KEPT_ATTEMPTS``; ``past`` counts those before them.
    ``checkpoint_step`` and ``checkpoint_at`` are those of the newest checkpoint, which may lie in the memory of a rank
    actor; ``checkpoint_path``, ``durable_step`` and ``durable_at`` are those of the newest on storage. ``not_before``
    is a back-off; until ``fenced_until`` ranks of a lost gang may still run somewhere. ``unusable`` (not stored) names what
    was replaced by defaults when the record was read.
    """

    id: JobId
    sequence: int
    version: int
    name: str
    spec: JobSpec
    user: str
    uid: int
    submitted_at: float
    idempotency_key: str
    python: str
    path: str
    work_dir: str
    snapshot: str
    resume_from: str | None
    rerun_of: str | None
    priority: int
    state: JobState
    state_since: float
    reason: str
    attempts: tuple[Attempt, ...] = ()
    past: Past = field(default_factory=Past)
    gang: int = 0
    gang_open: bool = False
    gang_lost: bool = False
    nodes: tuple[str, ...] = ()
    seats: tuple[ev.Seat, ...] = ()
    attempt_live: bool = False
    pids: tuple[int, ...] = ()
    exits: tuple[Exit, ...] = ()
    succeeded: bool = False
    retry: bool = False
    keep_gang: bool = False
    not_before: float = 0.0
    stop: Stop | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    no_progress: int = 0
    checkpoint_step: int = 0
    checkpoint_at: float | None = None
    checkpoint_path: str = ""
    checkpoint_digest: str = ""
    durable_step: int = 0
    durable_at: float | None = None
    fenced_until: float = 0.0
    failure: ev.Failure | None = None
    degraded: bool = False
    notes: tuple[str, ...] = ()
    ended_at: float | None = None
    exit_code: int | None = None
    story: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()

    @property
    def num_workers(self) -> int:
        """Ranks of the current or last attempt; before the first, the fewest that it may have."""
        workers = self.spec.resources.num_workers
        if isinstance(workers, int):
            return workers
        return self.attempts[-1].ranks if self.attempts else self.least_workers

    @property
    def least_workers(self) -> int:
        """The fewest ranks that the next attempt may have."""
        return self._size[0]

    @property
    def most_workers(self) -> int:
        """The most ranks that the next attempt may have."""
        return self._size[1]

    @property
    def _size(self) -> tuple[int, int]:
        match self.spec.resources.num_workers:
            case ElasticWorkers() as elastic:
                return elastic.min, elastic.max
            case int(workers):
                return workers, workers
            case _:  # auto: whatever is free when it first starts, and from then on the same
                first = self.past.first_ranks or (self.attempts[0].ranks if self.attempts else None)
                return (first, first) if first else (1, MAX_WORKERS)

    @property
    def is_elastic(self) -> bool:
        """Its number of ranks may change from attempt to attempt."""
        return isinstance(self.spec.resources.num_workers, ElasticWorkers)

    @property
    def grow_after(self) -> float:
        """Seconds that an attempt of an elastic job runs before it may be stopped to grow."""
        workers = self.spec.resources.num_workers
        return workers.grow_after.total_seconds() if isinstance(workers, ElasticWorkers) else 0.0

    @property
    def attempt(self) -> Attempt | None:
        """The current or last attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def attempt_number(self) -> int:
        """Number of the current or last attempt; 0 before the first."""
        return self.attempts[-1].number if self.attempts else 0

    @property
    def left_early(self) -> tuple[Exit, ...]:
        """The ranks that ended, however, after a request to stop that orch had not sent, and before their last step.

        A rank that reports no steps has come to its last one when another has.
        """
        finished = any(e.finished for e in self.exits)
        return tuple(e for e in self.exits if self._asked_from_outside(e) and not self._completed(e, finished=finished))

    def _asked_from_outside(self, ended: Exit) -> bool:
        return ended.stop_seen_at is not None and (self.stop is None or ended.stop_seen_at < self.stop.at)

    def _completed(self, ended: Exit, *, finished: bool) -> bool:
        return ended.ok and (ended.finished or (finished and ended.last_step is None))

    @property
    def ended_well(self) -> bool:
        """Every rank ended with 0, and none because it was asked to."""
        return len(self.exits) == self.num_workers and all(e.ok for e in self.exits) and not self.left_early

    @property
    def whole(self) -> Past:
        """The counters over all attempts, the listed ones included."""
        return self.past.add_all(self.attempts)

    @property
    def started_at(self) -> float | None:
        """When all ranks of an attempt were up for the first time."""
        if self.past.running_at is not None:
            return self.past.running_at
        return next((a.running_at for a in self.attempts if a.running_at is not None), None)


def submitted(event: ev.JobSubmitted, sequence: int) -> Job:
    """The record that a submission begins."""
    spec = from_dict(dict(event.spec))
    return Job(
        id=event.job_id,
        sequence=sequence,
        version=1,
        name=event.name,
        spec=spec,
        user=event.user,
        uid=event.uid,
        submitted_at=event.at,
        idempotency_key=event.idempotency_key,
        python=event.python,
        path=event.path,
        work_dir=event.work_dir,
        snapshot=event.snapshot,
        resume_from=event.resume_from,
        rerun_of=event.rerun_of,
        priority=spec.priority,
        state=JobState.PENDING,
        state_since=event.at,
        reason="waiting to be placed",
        story=(f"{event.at:.3f} job_submitted",),
    )


def fold(job: Job, event: ev.Event) -> Job:
    """The record after ``event``. Raises IllegalTransitionError for what the state table lacks."""
    if job.state.is_terminal and not isinstance(event, ev.JobNoted):
        return job  # terminal is absorbing: a late fact of a dead rank changes nothing
    after = _fold(event, job)
    if after is job:
        return job
    story = (
        *job.story[-STORY_LENGTH + 1 :],
        f"{event.at:.3f} {event.kind}" + (f" [{event.cause}]" if event.cause else ""),
    )
    return replace(after, version=job.version + 1, story=story)


@singledispatch
def _fold(event: ev.Event, job: Job) -> Job:
    raise CoreError(f"{type(event).__name__} cannot happen to job {job.id}, which exists")


def _to(job: Job, state: JobState, at: float, reason: str) -> Job:
    if state is job.state:
        return replace(job, reason=reason)
    check_transition(job.state, state, job.story)
    return replace(job, state=state, state_since=at, reason=reason)


def _with_attempt(job: Job, **changes: Any) -> Job:
    return replace(job, attempts=(*job.attempts[:-1], replace(job.attempts[-1], **changes)))


def _current(job: Job, attempt: int) -> bool:
    return bool(job.attempts) and job.attempts[-1].number == attempt


def _holds_nothing(job: Job, event: ev.Event) -> None:
    if job.gang_open or job.attempt_live:
        raise BrokenRuleError(job.id, f"{event.kind} while its gang is not confirmed gone", job.story)


@_fold.register
def _(event: ev.AttemptStarted, job: Job) -> Job:
    if event.attempt <= job.attempt_number:
        return job
    fresh = event.gang != job.gang
    if job.attempt_live or (fresh and job.gang_open):
        raise BrokenRuleError(job.id, "a second attempt while one is not confirmed gone", job.story)
    if not fresh and (job.gang_lost or not job.gang_open):
        raise BrokenRuleError(job.id, "an attempt in a gang that is gone", job.story)
    attempt = Attempt(
        number=event.attempt,
        gang=event.gang,
        state=AttemptState.STARTING,
        started_at=event.at,
        start_step=job.checkpoint_step,
        checkpoint_step=job.checkpoint_step,
        ranks=len(event.nodes),
    )
    job = _to(job, JobState.STARTING, event.at, "placing the gang" if fresh else "starting the ranks again")
    past, attempts = shorten(job.past, (*_without_log(job.attempts), attempt))
    return replace(
        job,
        attempts=attempts,
        past=past,
        gang=event.gang,
        gang_open=True,
        gang_lost=False,
        nodes=event.nodes,
        seats=() if fresh else job.seats,
        attempt_live=True,
        pids=(),
        exits=(),
        succeeded=False,
        retry=False,
        not_before=0.0,
        stop=None,
        degraded=job.degraded and not fresh,
    )


def _without_log(attempts: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
    # The events keep the lines; the record, which is written with every event, must stay small.
    if not attempts or attempts[-1].failure is None:
        return attempts
    return (*attempts[:-1], replace(attempts[-1], failure=replace(attempts[-1].failure, log_tail=())))


@_fold.register
def _(event: ev.GangPlaced, job: Job) -> Job:
    if event.gang != job.gang or not job.gang_open or job.gang_lost or job.seats == event.seats:
        return job
    return replace(
        job, seats=event.seats, reason="starting the ranks" if job.state is JobState.STARTING else job.reason
    )


@_fold.register
def _(event: ev.AttemptRunning, job: Job) -> Job:
    if not _current(job, event.attempt) or job.state is not JobState.STARTING:
        return job
    reason = job.reason if job.gang_lost else "every rank is up"
    job = _with_attempt(job, state=AttemptState.RUNNING, running_at=event.at)
    return replace(_to(job, JobState.RUNNING, event.at, reason), pids=event.pids)


@_fold.register
def _(event: ev.RankExited, job: Job) -> Job:
    if not _current(job, event.attempt) or not job.gang_open or any(e.rank == event.rank for e in job.exits):
        return job
    ended = Exit(**{f.name: getattr(event, f.name) for f in fields(Exit)})
    return replace(job, exits=(*job.exits, ended))


@_fold.register
def _(event: ev.GangLost, job: Job) -> Job:
    if event.gang != job.gang or not job.gang_open:
        return job
    if job.gang_lost and event.not_before <= job.fenced_until:
        return job  # nothing new; a second node that is cut off would be
    return replace(
        job,
        gang_lost=True,
        keep_gang=False,
        not_before=max(job.not_before, event.not_before),
        fenced_until=max(job.fenced_until, event.not_before),
        reason=job.reason if job.gang_lost else event.reason,
    )


@_fold.register
def _(event: ev.AttemptFailed, job: Job) -> Job:
    if not _current(job, event.attempt) or job.state not in (JobState.STARTING, JobState.RUNNING) or job.succeeded:
        return job
    failure_class = event.failure.failure_class
    preempted = failure_class is FailureClass.PREEMPTION
    job = _with_attempt(
        job,
        state=_failed_attempt(job, failure_class),
        ended_at=event.failed_at,
        failure=event.failure,
    )
    attempt = job.attempts[-1]
    restarts = dict(job.restarts)
    if event.retry:
        restarts[failure_class.value] = restarts.get(failure_class.value, 0) + 1
    progressed = attempt.progressed or job.checkpoint_step > attempt.start_step
    job = _to(job, JobState.RECOVERING, event.at, event.failure.sentence)
    return replace(
        job,
        retry=event.retry,
        keep_gang=event.keep_gang and not job.gang_lost,
        not_before=max(event.not_before, job.not_before),
        restarts=restarts,
        no_progress=(0 if progressed else job.no_progress) + int(event.retry and not preempted),
        failure=event.failure,
    )


def _failed_attempt(job: Job, failure_class: FailureClass) -> AttemptState:
    if failure_class is FailureClass.PREEMPTION:
        return AttemptState.PREEMPTED
    return AttemptState.LOST if failure_class is FailureClass.INFRA and job.gang_lost else AttemptState.FAILED


@_fold.register
def _(event: ev.AttemptSucceeded, job: Job) -> Job:
    if not _current(job, event.attempt) or job.state not in (JobState.RUNNING, JobState.DRAINING) or job.succeeded:
        return job
    job = _with_attempt(job, state=AttemptState.SUCCEEDED, ended_at=event.at)
    return replace(job, succeeded=True, attempt_live=False, reason="every rank ended with 0; releasing the GPUs")


@_fold.register
def _(event: ev.AttemptGone, job: Job) -> Job:
    if not _current(job, event.attempt) or not job.attempt_live:
        return job
    if job.state is JobState.DRAINING and job.attempts[-1].ended_at is None:
        job = _with_attempt(job, ended_at=event.at, state=_drained_attempt(job))
    return replace(job, attempt_live=False, pids=())


def _drained_attempt(job: Job) -> AttemptState:
    if job.stop is not None and job.stop.purpose is StopPurpose.PREEMPT:
        return AttemptState.PREEMPTED
    return AttemptState.ABORTED


@_fold.register
def _(event: ev.GangReleased, job: Job) -> Job:
    if event.gang != job.gang or not job.gang_open:
        return job
    if job.attempt_live:
        job = _fold(ev.AttemptGone(job_id=job.id, at=event.at, attempt=job.attempt_number), job)
    return replace(
        job,
        gang_open=False,
        gang_lost=False,
        keep_gang=False,
        seats=(),
        nodes=(),
        pids=(),
        degraded=False,
        checkpoint_step=job.durable_step,  # a newer one was in the memory of the actors that are gone
        checkpoint_at=job.durable_at,
    )


@_fold.register
def _(event: ev.StopRequested, job: Job) -> Job:
    if job.succeeded or (job.state is JobState.RECOVERING and not job.retry):
        return job  # its end is decided; only its gang has to go
    reason = _STOP_REASONS[event.purpose].format(by=event.by)
    if job.state is JobState.DRAINING and job.stop is not None:
        if not event.purpose.overrides(job.stop.purpose):
            return job
        # Its processes were told at the first stop: their time to save runs from there.
        deadline = min(job.stop.deadline, event.deadline)
        stop = Stop(purpose=event.purpose, by=event.by, at=job.stop.at, deadline=deadline)
        return replace(job, stop=stop, reason=reason)
    if job.attempt_live and job.attempts[-1].ended_at is None:
        job = _with_attempt(job, state=AttemptState.DRAINING)
    stop = Stop(purpose=event.purpose, by=event.by, at=event.at, deadline=event.deadline)
    return replace(_to(job, JobState.DRAINING, event.at, reason), stop=stop)


_STOP_REASONS: Mapping[StopPurpose, str] = {
    StopPurpose.CANCEL: "cancelled by {by}; its processes have time to save",
    StopPurpose.PAUSE: "paused by {by}; its processes have time to save",
    StopPurpose.PREEMPT: "making room ({by}); its processes have time to save",
    StopPurpose.TIMEOUT: "ran longer than max_duration; its processes have time to save",
    StopPurpose.RESIZE: "stopped by {by}; its processes have time to save",
}


@_fold.register
def _(event: ev.JobRequeued, job: Job) -> Job:
    if job.state is JobState.PENDING:
        return job
    _holds_nothing(job, event)
    job = _to(job, JobState.PENDING, event.at, event.reason)
    return replace(job, not_before=event.not_before, stop=None, retry=False, exits=(), succeeded=False)


@_fold.register
def _(event: ev.JobSuspended, job: Job) -> Job:
    if job.state is JobState.SUSPENDED:
        return job
    _holds_nothing(job, event)
    job = _to(job, JobState.SUSPENDED, event.at, f"paused by {event.by}")
    return replace(job, stop=None, retry=False, exits=(), succeeded=False)


@_fold.register
def _(event: ev.JobResumed, job: Job) -> Job:
    if job.state is JobState.PENDING:
        return job
    _holds_nothing(job, event)
    return replace(
        _to(job, JobState.PENDING, event.at, f"resumed by {event.by}"), not_before=0.0, stop=None, retry=False
    )


@_fold.register
def _(event: ev.JobFinished, job: Job) -> Job:
    _holds_nothing(job, event)
    if not event.state.is_terminal:
        raise BrokenRuleError(job.id, f"finished as {event.state}, which is no end", job.story)
    failure = _last_failure(job, event)
    job = _to(job, event.state, event.at, event.reason)
    return replace(job, ended_at=event.at, exit_code=event.exit_code, failure=failure, stop=None)


def _last_failure(job: Job, event: ev.JobFinished) -> ev.Failure | None:
    if event.state is not JobState.FAILED:
        return None
    if job.stop is not None and job.stop.purpose is StopPurpose.TIMEOUT:
        return ev.Failure(failure_class=FailureClass.TIMEOUT, code="max_duration", sentence=event.reason)
    return job.failure


@_fold.register
def _(event: ev.CheckpointSaved, job: Job) -> Job:
    return checkpoint_saved(event, job)


@_fold.register
def _(event: ev.FirstStep, job: Job) -> Job:
    if not _current(job, event.attempt) or job.attempts[-1].first_step_at is not None:
        return job
    return _with_attempt(job, first_step_at=event.step_at, first_step=event.step, steps_lost=event.steps_lost)


@_fold.register
def _(event: ev.JobUpdated, job: Job) -> Job:
    if event.priority == job.priority:
        return job
    return replace(job, priority=event.priority)


@_fold.register
def _(event: ev.JobNoted, job: Job) -> Job:
    degraded = job.degraded if event.degraded is None else event.degraded
    if degraded == job.degraded and job.notes[-1:] == (event.message,):
        return job
    return replace(job, degraded=degraded, notes=(*job.notes[-9:], event.message))
