"""Records of simulated jobs. Pure.

They are the same as those that the fold makes of a job's events. The two that each job has are made directly, because a
long trace has millions of jobs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from orchestrator.core import events as ev
from orchestrator.core.facts import reasons
from orchestrator.core.ids import JobId
from orchestrator.core.job.attempt import Attempt
from orchestrator.core.job.phases import Gang, Pending, Running
from orchestrator.core.job.record import Job, Submission
from orchestrator.core.lifecycle.advance import advance
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.states import AttemptState
from orchestrator.spec.model import JobSpec, ResourcesSpec, WorkerResources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.simulation.trace import TraceJob

_PENDING: Final = Pending()
_QUEUED: Final = reasons.Queued()
_UP: Final = reasons.RanksUp()


def spec_of(job: TraceJob) -> JobSpec:
    """Return the spec of a job of a trace."""
    worker = WorkerResources(gpu=float(job.gpus), cpu=0.0)
    resources = ResourcesSpec(num_workers=job.ranks, resources_per_worker=worker)
    return JobSpec(
        name="simulated", entrypoint="simulated", resources=resources, priority=job.priority, queue=job.queue
    )


def submitted_record(job: TraceJob, sequence: int, spec: JobSpec) -> Job:
    """Return the record of a job that waits."""
    submission = Submission(
        id=JobId(f"{sequence:09}"),
        sequence=sequence,
        name=spec.name,
        spec=spec,
        user=job.user,
        uid=0,
        submitted_at=job.at,
        idempotency_key="",
        python="",
        path="",
        work_dir="",
        snapshot="",
        resume_from=None,
        rerun_of=None,
    )
    return Job(
        submission=submission,
        version=1,
        priority=spec.priority,
        phase=_PENDING,
        state_since=job.at,
        reason=_QUEUED,
    )


def started_record(job: Job, event: ev.AttemptStarted, shares: Sequence[str | None]) -> Job:
    """Return the record of a job with ranks that are up once they are placed; ``shares`` are its shared GPUs' ids."""
    if job.attempts or any(shares):
        record = fold(job, event)
        if any(shares):
            record = fold(record, _placed(record, shares, event.at))
        return fold(record, ev.AttemptRunning(job_id=job.id, at=event.at, attempt=record.attempt_number, pids=()))
    attempt = Attempt(
        number=event.attempt,
        gang=event.gang,
        state=AttemptState.RUNNING,
        started_at=event.at,
        running_at=event.at,
        ranks=len(event.nodes),
    )
    return Job(
        submission=job.submission,
        version=job.version + 2,
        priority=job.priority,
        phase=Running(gang=Gang(nodes=event.nodes, pids=())),
        state_since=event.at,
        reason=_UP,
        limit_since=event.at,
        attempts=(attempt,),
    )


def stopped_record(job: Job, event: ev.StopRequested) -> Job:
    """Return the record of a job that stops at once, and waits again or moves."""
    now = event.at
    record = fold(job, event)
    record = fold(record, ev.AttemptGone(job_id=record.id, at=now, attempt=record.attempt_number))
    record = fold(record, ev.GangReleased(job_id=record.id, at=now, gang=record.gang))
    for step in advance(record, now).events:
        record = fold(record, step)
    return replace(record, story=())


def _placed(job: Job, shares: Sequence[str | None], now: float) -> ev.GangPlaced:
    seats = tuple(
        ev.Seat(rank=rank, node_id=node, node_name=node, gpu_ids=(share or "",), gpu_uuids=(), actor_pid=0)
        for rank, (node, share) in enumerate(zip(job.nodes, shares, strict=True))
    )
    return ev.GangPlaced(job_id=job.id, at=now, gang=job.gang, seats=seats)
