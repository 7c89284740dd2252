"""Builds web hook notices: one for each hook of a job that subscribes to the entered state, or to findings. Pure.

The store writes notices in the transaction of the transition, so that none is lost when the daemon dies in between.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.core.facts.findings import Finding, finding_to_dict, key_of
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job

FINDING = "FINDING"
"""A hook's subscription to findings."""
_LONGEST_REASON = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One message to one hook: ``body`` is JSON as sent, ``made_at`` seconds since the epoch."""

    job_id: JobId
    url: str
    body: str
    made_at: float

    @property
    def receiver(self) -> str:
        """Return the part of the address that names the server: its notices wait in one queue."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}"


def notices_of(before: Job | None, after: Job, at: float) -> list[Notice]:
    """Return the notices of a transition at wall time ``at``; ``before`` is None at the submission."""
    if not after.spec.notify:
        return []
    notices = []
    if before is None or before.state is not after.state:
        notices += _to_hooks(after, after.state.value, _payload(before, after, at), at)
    for finding in _opened(before, after):
        notices += _to_hooks(after, FINDING, _finding_payload(finding, _payload(before, after, at)), at)
    return notices


def _to_hooks(job: Job, wanted: str, payload: dict[str, Any], at: float) -> list[Notice]:
    hooks = [hook for hook in job.spec.notify if wanted in hook.on]
    body = json.dumps(payload) if hooks else ""
    return [Notice(job_id=job.id, url=hook.url, body=body, made_at=at) for hook in hooks]


def _opened(before: Job | None, after: Job) -> list[Finding]:
    known = {key_of(one) for one in (before.findings if before else ()) if isinstance(one, Finding)}
    return [one for one in after.findings if isinstance(one, Finding) and key_of(one) not in known]


def _finding_payload(finding: Finding, payload: dict[str, Any]) -> dict[str, Any]:
    described = finding_to_dict(finding, payload["job_id"])
    text = f"{payload['job_id']}: {described['sentence']}\n{described['advice']}"
    return {**payload, "text": text, "finding": described}


def _payload(before: Job | None, job: Job, at: float) -> dict[str, Any]:
    """Build the payload. ``text`` is for Slack and similar services; the rest is for programs."""
    failure = job.failure if job.state in (JobState.FAILED, JobState.RECOVERING) else None
    reason = job.reason.sentence()[:_LONGEST_REASON]
    lines = [f"{job.id} is {job.state}: {reason}"]
    if failure is not None and (advice := failure.advice(job.id)):
        lines.append(advice)
    return {
        "text": "\n".join(lines),
        "job_id": job.id,
        "name": job.name,
        "user": job.submission.user,
        "state": job.state.value,
        "was": None if before is None else before.state.value,
        "reason": reason,
        "fact": job.reason.to_dict(),
        "failure_class": None if failure is None else failure.failure_class.value,
        "failure_code": None if failure is None else failure.code,
        "attempt": job.attempt_number,
        "step": job.checkpoints.step,
        "exit_code": job.exit_code,
        "at": at,
        "labels": dict(job.spec.labels),
    }
