"""Folds findings into a job's record, which lists the open ones. They end with their attempt, or with the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from orchestrator.core.diagnosis.definitions import definition_of
from orchestrator.core.facts.findings import Finding, key_of
from orchestrator.core.thresholds import MOST_FINDINGS

if TYPE_CHECKING:
    from orchestrator.core import events as ev
    from orchestrator.core.job.record import Job


def finding_opened(event: ev.FindingOpened, job: Job) -> Job:
    """Add an open finding, if its attempt is the current one and it is not open yet."""
    finding = event.finding
    if not isinstance(finding, Finding) or event.attempt != job.attempt_number or len(job.findings) >= MOST_FINDINGS:
        return job
    known = {key_of(one) for one in job.findings if isinstance(one, Finding)}
    return job if key_of(finding) in known else replace(job, findings=(*job.findings, finding))


def finding_closed(event: ev.FindingClosed, job: Job) -> Job:
    """Remove a finding."""
    if not isinstance(event.finding, Finding):
        return job
    closed = key_of(event.finding)
    left = tuple(one for one in job.findings if not (isinstance(one, Finding) and key_of(one) == closed))
    return replace(job, findings=left) if len(left) < len(job.findings) else job


def without_ended(before: Job, after: Job) -> Job:
    """Return the record after an event, without the findings that ended with it."""
    if not after.findings:
        return after
    if after.state.is_terminal:
        return replace(after, findings=())
    if before.attempt_number == after.attempt_number and (after.attempt_live or not before.attempt_live):
        return after
    kept = tuple(one for one in after.findings if isinstance(one, Finding) and definition_of(one).outlives)
    return replace(after, findings=kept) if len(kept) < len(after.findings) else after
