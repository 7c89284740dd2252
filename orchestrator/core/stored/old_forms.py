"""Converts stored parts of earlier versions, which held sentences where there are facts now, to the present form. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.core.facts.codec import fact_from, fact_to_dict

if TYPE_CHECKING:
    from collections.abc import Mapping


def current_job(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a job's record: the same object where it is in the present form."""
    changes: dict[str, Any] = {}
    if "cause" not in (row.get("failure") or {"cause": None}):
        changes["failure"] = current_failure(row["failure"])
    if any(attempt["failure"] and "cause" not in attempt["failure"] for attempt in row.get("attempts", ())):
        changes["attempts"] = [{**a, "failure": current_failure(a["failure"])} for a in row["attempts"]]
    if any(ended.get("policy_note") == "" for ended in row.get("exits", ())):
        changes["exits"] = [current_exit(ended) for ended in row["exits"]]
    return {**row, **changes} if changes else row


def current_failure(value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Convert a failure. Earlier ones had a sentence, a code and advice for their cause."""
    if value is None or "cause" in value:
        return value
    cause = fact_from(value["sentence"], code=value["code"], advice=value.get("advice", ""))
    rest = {name: item for name, item in value.items() if name not in ("sentence", "code", "advice")}
    return {**rest, "cause": fact_to_dict(cause)}


def current_exit(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a rank's end. Earlier ones had an empty sentence for no note."""
    return {**value, "policy_note": None} if value.get("policy_note") == "" else value


def current_body(kind: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the fields of an event."""
    match kind:
        case "attempt_failed":
            return {**body, "failure": current_failure(body["failure"])}
        case "rank_exited":
            return current_exit(body)
        case "job_noted" if "note" not in body:
            note = fact_from(body["message"], code=body["code"])
            return {"note": fact_to_dict(note), "degraded": body.get("degraded")}
        case _:
            return body


def current_strike(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a strike against a node or a GPU."""
    if "cause" in value:
        return value
    cause = fact_from(value["sentence"], code=value["code"])
    rest = {name: item for name, item in value.items() if name not in ("sentence", "code")}
    return {**rest, "cause": fact_to_dict(cause)}
