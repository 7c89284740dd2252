"""Converts a job's record and its events to JSON-ready values and back, for the store. Pure.

``codec.py`` does it for all classes but one: job.yaml is read and written by ``spec``, which owns its form.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchestrator.core.codec import RecordError, from_plain, to_plain
from orchestrator.core.errors import UnknownEventError
from orchestrator.core.events import EVENTS, Event, JobSubmitted
from orchestrator.core.facts import codec as _facts  # noqa: F401  # the codec knows facts from then on
from orchestrator.core.job.record import Job
from orchestrator.spec.job import from_dict
from orchestrator.spec.problems import SpecError
from orchestrator.spec.reader.reading import to_dict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.ids import JobId
    from orchestrator.spec.model import JobSpec

_COLUMNS = ("kind", "job_id", "at", "cause")
_LONGEST_KEPT = 16 * 1024
"""Characters of a spec that is kept for others equal to it; larger ones would add up to gigabytes."""


def job_to_dict(job: Job) -> dict[str, Any]:
    """Return the record as JSON-ready values, for the store's row."""
    plain: dict[str, Any] = to_plain(job)
    plain["submission"]["spec"] = to_dict(job.spec)
    return plain


def job_from_dict(row: Mapping[str, Any]) -> Job:
    """Convert ``job_to_dict``'s values. Raises RecordError."""
    submission = row.get("submission")
    if not isinstance(submission, dict) or "spec" not in submission:
        raise RecordError("Job: it has no submission with a spec")
    return from_plain(Job, {**row, "submission": {**submission, "spec": _spec_of(submission["spec"])}})


def event_body(event: Event) -> dict[str, Any]:
    """Return the event's own fields as JSON-ready values; its kind, job_id, at and cause are columns of the store."""
    plain = {name: value for name, value in to_plain(event).items() if name not in _COLUMNS}
    return {**plain, "spec": to_dict(event.spec)} if isinstance(event, JobSubmitted) else plain


def event_from(kind: str, body: Mapping[str, Any], *, job_id: JobId, at: float, cause: str) -> Event:
    """Convert ``event_body``'s values. Raises RecordError; UnknownEventError for a kind of a newer version."""
    cls = EVENTS.get(kind)
    if cls is None:
        raise UnknownEventError(f"event {kind!r}: upgrade orch to the version that wrote this store")
    if cls is JobSubmitted and "spec" in body:
        body = {**body, "spec": _spec_of(body["spec"])}
    return from_plain(cls, {**body, "job_id": job_id, "at": at, "cause": cause})


def spec_bytes(spec: JobSpec) -> int:
    """Return the length of the spec's stored form, in characters: about what it takes of memory and of the store."""
    return len(json.dumps(to_dict(spec)))


def _spec_of(form: Any) -> JobSpec:
    """Return one object for equal specs: a long queue usually has few different ones, and parsing them is the largest cost."""
    text = json.dumps(form)
    return _spec_of_text.__wrapped__(text) if len(text) > _LONGEST_KEPT else _spec_of_text(text)


@lru_cache(1024)
def _spec_of_text(text: str) -> JobSpec:
    try:
        return from_dict(json.loads(text))
    except SpecError as error:
        raise RecordError(str(error)) from error
