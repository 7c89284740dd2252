"""Helpers that lead jobs through a store by legal events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core import events as ev
from orchestrator.core.facts.codec import fact_from
from orchestrator.core.lifecycle.fold import change_of
from orchestrator.core.states import JobState
from tests.unit.core.builders import T0, checkpoint, exited, finished, make_spec, released, started, submission

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.store.store import Store


async def add(store: Store, job_id: str, *, at: float = T0, spec: Any = None, **fields: Any) -> Job:
    """Submit a job, which waits."""
    spec = spec or make_spec(name=job_id.rsplit("-", 1)[0])
    job, new = await store.submit(submission(spec, job_id=job_id, at=at, **fields))
    assert new
    return job


async def write(store: Store, events: Sequence[ev.Event]) -> list[Job]:
    """Fold events onto their stored jobs, and write the changes; return the record of every job named."""
    jobs: dict[JobId, Job] = {}
    changes = []
    for event in events:
        job = jobs[event.job_id] if event.job_id in jobs else await store.job(event.job_id)
        change = change_of(job, event)
        changes += [change] if change else []
        jobs[event.job_id] = change.after if change else job
    await store.append(changes)
    return list(jobs.values())


async def run_it(store: Store, job: Job) -> Job:
    """Start the job, and bring its ranks up."""
    begun = started(job)
    (job,) = await write(
        store, [begun, ev.AttemptRunning(job_id=job.id, at=T0 + 3, attempt=begun.attempt, pids=(1, 2))]
    )
    return job


async def end(store: Store, job: Job, *, at: float = T0 + 30) -> Job:
    """Run the job, and let it succeed."""
    job = await run_it(store, job)
    zeros = [exited(job, rank, exit_code=0) for rank in range(job.num_workers)]
    won = ev.AttemptSucceeded(job_id=job.id, at=T0 + 11, attempt=job.attempt_number)
    (job,) = await write(store, [checkpoint(job, 5, path="/ckpt/5"), *zeros, won, released(job)])
    (job,) = await write(store, [finished(job, JobState.SUCCEEDED, at=at, exit_code=0)])
    return job


async def cancel(store: Store, job: Job, *, at: float = T0 + 30) -> Job:
    """Cancel the job while it waits."""
    (job,) = await write(store, [finished(job, JobState.CANCELLED, at=at)])
    return job


def notes_of(job: Job) -> tuple[str, ...]:
    """Return the job's notes as sentences."""
    return tuple(each.sentence() for each in job.notes)


def note(job: Job, message: str, *, at: float = T0 + 40) -> ev.JobNoted:
    """Return an event that changes no state."""
    return ev.JobNoted(job_id=job.id, at=at, note=fact_from(message))
