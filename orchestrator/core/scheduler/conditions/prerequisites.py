"""Decides what a job with dependencies waits for, and whether that is still possible. Pure.

A job's dependencies are resolved to ids when it is accepted, so they form no cycle: each is older than the job. They
count until its first attempt; the end of a prerequisite never changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.facts.reasons import AwaitsJob, PrerequisiteGone, PrerequisiteUnmet
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.events import Prerequisite
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job


def prerequisites(job: Job) -> tuple[Prerequisite, ...]:
    """Return what must have ended before the job starts; nothing once it has started, or ended itself."""
    return job.submission.prerequisites if job.state is JobState.PENDING and not job.attempts else ()


def hindrance(
    job: Job, live: Mapping[JobId, Job], ended: Mapping[JobId, JobState | None]
) -> AwaitsJob | PrerequisiteUnmet | PrerequisiteGone | None:
    """Return what keeps the job from starting: the first job that it waits for, or one that ended in the wrong way.

    ``ended`` has the states of jobs that are not in ``live``; None, or no entry, for one without a record.
    """
    open_: list[AwaitsJob] = []
    for needed in prerequisites(job):
        other = live.get(needed.job_id)
        state = ended.get(needed.job_id) if other is None else other.state
        if state is None:
            return PrerequisiteGone(job=needed.job_id, on=needed.on)
        if state.is_terminal and not needed.on.met_by(state):
            return PrerequisiteUnmet(job=needed.job_id, on=needed.on, state=state)
        if not state.is_terminal:
            open_.append(AwaitsJob(job=needed.job_id, on=needed.on, state=state))
    if not open_:
        return None
    first = open_[0]
    return AwaitsJob(job=first.job, on=first.on, state=first.state, more=len(open_) - 1)
