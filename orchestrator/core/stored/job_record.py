"""Converts a job's record and its events to JSON-ready values and back."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchestrator.core.codec import RecordError, from_plain, leave_out, to_plain, use_form
from orchestrator.core.errors import UnknownEventError
from orchestrator.core.events import EVENTS, Event, Exit, JobSubmitted, RankExited
from orchestrator.core.spec_memo import SpecMemo
from orchestrator.core.stored.fresh import LONGEST_KEPT, FreshRecords
from orchestrator.core.stored.stored_job import JobRecord, job_of, record_of
from orchestrator.spec.job import SpecError, from_dict, to_dict
from orchestrator.spec.model import JobSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.spec.fields.nodes import JsonValue

_FORMS = 1024
_forms: SpecMemo[dict[str, JsonValue]] = SpecMemo()
_sizes: SpecMemo[int] = SpecMemo()
_read_forms: dict[tuple[str, str], tuple[Any, JobSpec]] = {}
"""The forms that were read last, by name and resources: the spec of an equal form is found without making its text."""


def job_to_dict(job: Job) -> dict[str, Any]:
    """Return the record as JSON-ready values, for the store's row."""
    return to_plain(record_of(job))


def job_from_text(text: str) -> Job:
    """Convert the text of ``job_to_dict``'s values, compact JSON, as ``job_from_dict`` does. Raises ValueError where it is no JSON."""
    fresh = _fresh.read_text(text)
    if fresh is None:
        fresh = job_from_dict(json.loads(text))
        _fresh.learn_text(text, fresh)
    return fresh


def job_from_dict(row: Mapping[str, Any]) -> Job:
    """Convert ``job_to_dict``'s values. Values of the wrong type become defaults."""
    fresh = _fresh.read(row)
    if fresh is not None:
        return fresh
    record, unusable = from_plain(JobRecord, row)
    job = job_of(record, unusable=unusable)
    _fresh.learn(row, job)
    return job


def event_body(event: Event) -> dict[str, Any]:
    """Return the event's own fields as JSON-ready values; job_id, at and cause are columns of the store."""
    return to_plain(event)


def event_from(kind: str, body: Mapping[str, Any], *, job_id: JobId, at: float, cause: str) -> Event:
    """Convert ``event_body``'s values. Raises UnknownEventError for a kind of a newer version; values of the wrong type become defaults."""
    cls = EVENTS.get(kind)
    if cls is None:
        raise UnknownEventError(f"event {kind!r}: upgrade orch to the version that wrote this store")
    return from_plain(cls, {**body, "job_id": job_id, "at": at, "cause": cause})[0]


def _spec_form(spec: JobSpec) -> dict[str, JsonValue]:
    """Return the spec's canonical form, computed once: the record is rewritten with every event, its spec stays the same object."""
    return _forms.of(spec, to_dict, spec)


def spec_bytes(spec: JobSpec) -> int:
    """Return the length of the spec's stored form, in characters: about what it takes of memory and of the store."""
    return _sizes.of(spec, lambda one: len(json.dumps(_spec_form(one))), spec)


def _spec_of(form: Any) -> JobSpec:
    """Return one object for equal specs: a long queue usually has few different ones, and parsing them is the largest cost."""
    key = (str(form.get("name")), str(form.get("resources"))) if isinstance(form, dict) else None
    known = None if key is None else _read_forms.get(key)
    if known is not None and known[0] == form:
        return known[1]
    text = json.dumps(form)
    if len(text) > LONGEST_KEPT:
        return _spec_of_text.__wrapped__(text)
    spec = _spec_of_text(text)
    if key is not None:
        if len(_read_forms) >= _FORMS:
            _read_forms.clear()
        _read_forms[key] = form, spec
    return spec


@lru_cache(_FORMS)
def _spec_of_text(text: str) -> JobSpec:
    try:
        return from_dict(json.loads(text))
    except SpecError as error:
        raise RecordError(str(error)) from error


def _exited_form(event: RankExited) -> dict[str, Any]:
    """Return the end of a rank in one flat object, its time as ``ended_at``: the event's own is when the daemon learnt of it."""
    end = to_plain(replace(event.exit, heard_at=0.0))
    return {"attempt": event.attempt, "ended_at": end.pop("at"), **end}


def _exited_of(body: Mapping[str, Any]) -> RankExited:
    own = {name: body[name] for name in ("job_id", "at", "cause", "attempt")}
    end = {name: value for name, value in body.items() if name not in own}
    ended_at = end.pop("ended_at")
    return RankExited(**own, exit=from_plain(Exit, {**end, "at": ended_at})[0])


_fresh = FreshRecords(_spec_of)
use_form(RankExited, _exited_form, _exited_of)
JobSubmitted.__annotations__["spec"] = JobSpec  # imported for type checkers only there: a rank actor has no use for it
use_form(JobSpec, _spec_form, _spec_of)
leave_out(Event, "job_id", "at", "cause")
