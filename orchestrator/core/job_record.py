"""A job's record as JSON-ready values and back, also as earlier versions have written it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from orchestrator.core import events as ev
from orchestrator.core.attempt import Attempt, Exit, Stop
from orchestrator.core.conformance import repaired, repaired_all
from orchestrator.core.ids import JobId
from orchestrator.core.job import Job
from orchestrator.core.past_attempts import Past, past_from, shorten
from orchestrator.core.states import AttemptState, JobState, StopPurpose
from orchestrator.spec.job import from_dict, to_dict

if TYPE_CHECKING:
    from collections.abc import Mapping


def job_to_dict(job: Job) -> dict[str, Any]:
    """The record as JSON-ready values, for the store's row."""
    plain: dict[str, Any] = {}
    for f in fields(job):
        value = getattr(job, f.name)
        plain[f.name] = to_dict(value) if f.name == "spec" else _plain(value)
    del plain["unusable"]
    return plain


def current_record(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A stored record in today's form. Records of earlier versions list all attempts and have no counters."""
    if "past" in row:
        return row
    past, attempts = shorten(Past(), tuple(_attempt_from(a) for a in row["attempts"]))
    return {**row, "past": _plain(past), "attempts": row["attempts"][len(row["attempts"]) - len(attempts) :]}


def job_from_dict(row: Mapping[str, Any]) -> Job:
    """The inverse of ``job_to_dict``; records of earlier versions are read too.

    Values of the wrong type, which earlier versions let ranks write, become defaults.
    """
    row = current_record(row)
    stop = row["stop"]
    attempts, unusable = repaired_all("attempts", (_attempt_from(a) for a in row["attempts"]))
    exits, more = repaired_all("exits", (_exit_from(e) for e in row["exits"]))
    job = Job(
        **{
            **row,
            "id": JobId(row["id"]),
            "spec": from_dict(row["spec"]),
            "state": JobState(row["state"]),
            "attempts": attempts,
            "past": past_from(row["past"]),
            "nodes": tuple(row["nodes"]),
            "seats": tuple(_seat_from(s) for s in row["seats"]),
            "pids": tuple(row["pids"]),
            "exits": exits,
            "stop": None if stop is None else Stop(**{**stop, "purpose": StopPurpose(stop["purpose"])}),
            "failure": None if row["failure"] is None else ev.failure_from(row["failure"]),
            "notes": tuple(row["notes"]),
            "story": tuple(row["story"]),
        }
    )
    job, own = repaired(job)
    found = (*own, *unusable, *more)
    return replace(job, unusable=found) if found else job


def _exit_from(value: Mapping[str, Any]) -> Exit:
    restored = {
        "log_tail": tuple(value["log_tail"]),
        "evidence": tuple(value.get("evidence", ())),
        "memory": ev.memory_from(value.get("memory")),
        "stop_scope": ev.stop_scope_from(value.get("stop_scope")),
    }
    return Exit(**{**value, **restored})


def _attempt_from(value: Mapping[str, Any]) -> Attempt:
    failure = value["failure"]
    return Attempt(
        **{
            "progressed": value["checkpoint_step"] > value["start_step"],  # where an earlier version did not say
            **value,
            "state": AttemptState(value["state"]),
            "failure": None if failure is None else ev.failure_from(failure),
        }
    )


def _seat_from(value: Mapping[str, Any]) -> ev.Seat:
    return ev.Seat(**{**value, "gpu_ids": tuple(value["gpu_ids"]), "gpu_uuids": tuple(value["gpu_uuids"])})


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return dict(value)
    return value
