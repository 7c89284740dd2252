"""What web hooks are told: one notice for each hook of a job that asked for the state it has entered. Pure.

The store writes notices in the transaction of the transition, so that none is lost when the daemon dies in between.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.core.facts.codec import fact_to_dict
from orchestrator.core.sentences import failure_advice, sentence
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job

_LONGEST_REASON = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One message to one hook: ``body`` is JSON as it is sent, ``made_at`` seconds since the epoch."""

    job_id: JobId
    url: str
    body: str
    made_at: float


def notices_of(before: Job | None, after: Job, at: float) -> list[Notice]:
    """The notices of a transition at wall time ``at``; ``before`` is None at the submission."""
    if not after.spec.notify or (before is not None and before.state is after.state):
        return []
    body = json.dumps(_payload(before, after, at))
    return [
        Notice(job_id=after.id, url=hook.url, body=body, made_at=at)
        for hook in after.spec.notify
        if after.state.value in hook.on
    ]


def _payload(before: Job | None, job: Job, at: float) -> dict[str, Any]:
    """``text`` is what Slack and its kin show; the rest is for programs."""
    failure = job.failure if job.state in (JobState.FAILED, JobState.RECOVERING) else None
    reason = sentence(job.reason)[:_LONGEST_REASON]
    lines = [f"{job.id} is {job.state}: {reason}"]
    if failure is not None and (told := failure_advice(failure, job.id)):
        lines.append(told)
    return {
        "text": "\n".join(lines),
        "job_id": job.id,
        "name": job.name,
        "user": job.submission.user,
        "state": job.state.value,
        "was": None if before is None else before.state.value,
        "reason": reason,
        "fact": fact_to_dict(job.reason),
        "failure_class": None if failure is None else failure.failure_class.value,
        "failure_code": None if failure is None else failure.code,
        "attempt": job.attempt_number,
        "step": job.checkpoints.step,
        "exit_code": job.exit_code,
        "at": at,
        "labels": dict(job.spec.labels),
    }
