"""A job's record and its events as JSON-ready values and back, also as earlier versions have written them."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchestrator.core.codec import RecordError, from_plain, leave_out, to_plain, use_form
from orchestrator.core.errors import UnknownEventError
from orchestrator.core.events import EVENTS, Event, Exit, JobSubmitted, RankExited
from orchestrator.core.job.attempt import Attempt
from orchestrator.core.job.past_attempts import Past, shorten
from orchestrator.core.stored.old_forms import current_body, current_job
from orchestrator.core.stored.stored_job import JobRecord, job_of, record_of
from orchestrator.spec.job import SpecError, from_dict, to_dict
from orchestrator.spec.model import JobSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.spec.fields.nodes import JsonValue

_FORMS = 1024
_forms: dict[int, tuple[JobSpec, dict[str, JsonValue]]] = {}


def job_to_dict(job: Job) -> dict[str, Any]:
    """The record as JSON-ready values, for the store's row."""
    return to_plain(record_of(job))


def job_from_dict(row: Mapping[str, Any]) -> Job:
    """The inverse of ``job_to_dict``; records of earlier versions are read too.

    Values of the wrong type, which earlier versions let ranks write, become defaults.
    """
    record, unusable = from_plain(JobRecord, current_record(row))
    return job_of(record, unusable=unusable)


def current_record(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A stored record in today's form. Records of earlier versions list all attempts and have no counters."""
    row = current_job(row)
    attempts = row.get("attempts", ())
    if not all("progressed" in attempt for attempt in attempts):  # by its steps, where an earlier version did not say
        attempts = [{"progressed": a["checkpoint_step"] > a["start_step"], **a} for a in attempts]
        row = {**row, "attempts": attempts}
    if "past" in row:
        return row
    past, kept = shorten(Past(), tuple(from_plain(Attempt, attempt)[0] for attempt in attempts))
    return {**row, "past": to_plain(past), "attempts": attempts[len(attempts) - len(kept) :]}


def event_body(event: Event) -> dict[str, Any]:
    """The event's own fields as JSON-ready values; job_id, at and cause are columns of the store."""
    return to_plain(event)


def event_from(kind: str, body: Mapping[str, Any], *, job_id: JobId, at: float, cause: str) -> Event:
    """The inverse of ``event_body``. Raises UnknownEventError for a kind of a newer version.

    Values of the wrong type, which earlier versions took from ranks as they came, are replaced by defaults.
    """
    cls = EVENTS.get(kind)
    if cls is None:
        raise UnknownEventError(f"event {kind!r}: upgrade orch to the version that wrote this store")
    return from_plain(cls, {**current_body(kind, body), "job_id": job_id, "at": at, "cause": cause})[0]


def _spec_form(spec: JobSpec) -> dict[str, JsonValue]:
    """The spec's canonical form, made once: the record is written anew with every event, its spec stays the same object."""
    known = _forms.get(id(spec))
    if known is not None and known[0] is spec:
        return known[1]
    if len(_forms) >= _FORMS:
        _forms.clear()
    form = to_dict(spec)
    _forms[id(spec)] = spec, form
    return form


def _spec_of(form: Any) -> JobSpec:
    """Equal specs are one object: a long queue is most often made of few of them, and reading one costs more than all else."""
    return _spec_of_text(json.dumps(form))


@lru_cache(_FORMS)
def _spec_of_text(text: str) -> JobSpec:
    try:
        return from_dict(json.loads(text))
    except SpecError as error:
        raise RecordError(str(error)) from error


def _exited_form(event: RankExited) -> dict[str, Any]:
    """The end of a rank as all versions have stored it: flat. When it was is the event's own time."""
    end = to_plain(event.exit)
    del end["at"]
    return {"attempt": event.attempt, **end}


def _exited_of(body: Mapping[str, Any]) -> RankExited:
    own = {name: body[name] for name in ("job_id", "at", "cause", "attempt")}
    end = {name: value for name, value in body.items() if name not in own}
    return RankExited(**own, exit=from_plain(Exit, {**end, "at": body["at"]})[0])


use_form(RankExited, _exited_form, _exited_of)
JobSubmitted.__annotations__["spec"] = JobSpec  # imported for type checkers only there: a rank actor has no use for it
use_form(JobSpec, _spec_form, _spec_of)
leave_out(Event, "job_id", "at", "cause")
