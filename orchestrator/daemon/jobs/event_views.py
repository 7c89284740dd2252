"""Converts a stored event to a line of a job's history: fields for programs, and a sentence for users. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api import views as v
from orchestrator.core import events as ev
from orchestrator.core.events import FirstStep
from orchestrator.core.facts.gangs import RecordRestored
from orchestrator.core.facts.reasons import StopOrdered
from orchestrator.core.stored import event_body
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.events import LeftOut
    from orchestrator.store.port import StoredEvent

# Path in a library's source where an error was raised, on its builder's machine. It is cut from the message.
_SOURCE_PLACE: Final = re.compile(r"\[\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ?")


def event_view(stored: StoredEvent) -> v.EventView:
    """Return one line of a job's history."""
    event = stored.event
    body = event_body(event) | _sentences_about(event)
    if isinstance(event, ev.RankExited):
        end = body.pop("exit")
        body |= {"ended_at": end.pop("at"), **end}
    if event.kind == "job_submitted":
        shown = ("name", "user", "python", "work_dir", "resume_from", "rerun_of", "left_out", "git", "prerequisites")
        body = {name: body[name] for name in shown}
    return v.EventView(
        sequence=stored.number,
        at=event.step_at if isinstance(event, FirstStep) else event.at,  # when it was done, not when it was reported
        kind=event.kind,
        attempt=body.get("attempt"),
        summary=_summary(event, body),
        cause=event.cause,
        body=body,
    )


def _sentences_about(event: ev.Event) -> dict[str, Any]:
    """Return the sentences about an event, beside its facts."""
    match event:
        case (
            ev.RanksAsked(reason=fact)
            | ev.GangLost(reason=fact)
            | ev.JobRequeued(reason=fact)
            | ev.JobFinished(reason=fact)
        ):
            return {"reason": fact.sentence(), "fact": fact.to_dict()}
        case ev.StopRequested(by=fact) | ev.JobSuspended(by=fact) | ev.GangAbandoned(by=fact):
            return {"by": fact.sentence(), "fact": fact.to_dict()}
        case ev.JobNoted(note=note):
            todo = note.advice(event.job_id)
            message = note.sentence() + (f"; {todo}" if todo else "")
            return {"code": note.code, "message": message, "note": note.to_dict()}
        case ev.FindingOpened(finding=found) | ev.FindingClosed(finding=found):
            todo = found.advice(event.job_id)
            return {"code": found.code, "sentence": found.sentence(), "advice": todo, "finding": found.to_dict()}
        case ev.AttemptFailed(failure=failure):
            described = {
                "code": failure.code,
                "sentence": failure.sentence(),
                "advice": failure.advice(event.job_id),
            }
            return {"failure": event_body(event)["failure"] | described}
        case _:
            return {}


def left_out_view(left_out: LeftOut | None) -> v.LeftOutView | None:
    """Return what ignore files excluded from a job's copy of its working directory."""
    if left_out is None:
        return None
    return v.LeftOutView(
        files=left_out.files,
        size_bytes=left_out.size_bytes,
        by=left_out.by,
        largest=left_out.largest,
        more=left_out.more,
        links_out=left_out.links_out,
        links=left_out.links,
    )


def left_out_notes(left_out: v.LeftOutView | None) -> tuple[str, ...]:
    """Return sentences for the submitter: what was excluded, and which links lead out."""
    if left_out is None:
        return ()
    files = f"{_left_out_text(left_out.to_json())}: {', '.join(left_out.largest)}" if left_out.files else ""
    return tuple(note for note in (files, _links_text(left_out)) if note)


def _links_text(left_out: v.LeftOutView) -> str:
    if not left_out.links_out:
        return ""
    more = f" and {left_out.links_out - len(left_out.links)} more" if left_out.links_out > len(left_out.links) else ""
    lead = "leads" if left_out.links_out == 1 else "lead"
    return (
        f"{plural(left_out.links_out, 'link')} {lead} out of working_dir and {'is' if lead == 'leads' else 'are'} copied as"
        f" {'a link' if lead == 'leads' else 'links'}: {', '.join(left_out.links)}{more};"
        " each node of the job needs what is there"
    )


def _left_out_text(left_out: Mapping[str, Any]) -> str:
    """Return text such as ``3 files, 2.2 MB left out by .gitignore``."""
    files, by = left_out["files"], " and ".join(left_out["by"])
    count = f"{'more than ' if left_out['more'] else ''}{files} file{'' if files == 1 else 's'}"
    return f"{count}, {_megabytes(left_out['size_bytes'])} left out by {by}"


def _megabytes(size_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes} bytes"


def _summary(event: ev.Event, body: dict[str, Any]) -> str:
    if isinstance(event, ev.StopRequested):
        at_once = event.deadline <= event.at
        return StopOrdered(
            purpose=event.purpose, by=event.by, at_once=at_once
        ).sentence()  # the words of the job's reason
    match event.kind:
        case "job_submitted":
            left_out = body["left_out"]
            return f"submitted by {body['user']}" + (
                f"; {_left_out_text(left_out)}" if left_out and left_out["files"] else ""
            )
        case "attempt_started":
            ranks, nodes = len(body["nodes"]), len(set(body["nodes"]))
            return f"attempt {body['attempt']}: {plural(ranks, 'rank')} on {plural(nodes, 'node')}"
        case "attempt_gone":
            return f"all processes of attempt {body['attempt']} ended"
        case "gang_abandoned":
            return f"gang {body['gang']} given up by {body['by']}"
        case "gang_placed":
            gpus = [u for seat in body["seats"] for u in seat["gpu_uuids"]]
            return f"gang {body['gang']} placed" + (f" on {', '.join(gpus)}" if gpus else "")
        case "attempt_running":
            return "every rank is up: pids " + ", ".join(map(str, body["pids"]))
        case "rank_exited":
            how = f"signal {body['signal']}" if body["signal"] else f"exit code {body['exit_code']}"
            message = _SOURCE_PLACE.sub("", body["error_message"])[:120]
            error = f" ({body['error_type']}: {message})" if body["error_type"] else ""
            return f"rank {body['rank']} ended with {how}{error}"
        case "attempt_failed":
            why = f"{body['failure']['sentence']}; tried again" if body["retry"] else body["failure"]["sentence"]
            then = "" if body["retry"] or body["failure"]["refusal"] else "; not tried again"
            return f"attempt {body['attempt']} failed ({body['failure']['failure_class']}): {why}{then}"
        case "checkpoint_saved":
            if not body["path"]:
                return f"snapshot of step {body['step']} is complete, in memory only"
            return f"checkpoint of step {body['step']} is complete"
        case "first_step":
            n = body["steps_lost"]
            lost = f", {n} step{'s' if n > 1 else ''} done again" if n else ""
            return f"first new step {body['step']}{lost}"
        case "job_finished":
            return f"{body['state']}: {body['reason']}"
        case "ranks_asked" | "gang_lost" | "job_requeued":
            return str(body["reason"])
        case "clock_stepped":
            return f"the daemon's clock moved by {body['seconds']:+.1f} s, and all that is due with it"
        case "later_attempts_found":
            return RecordRestored(attempt=body["attempt"] or None).sentence()
        case "finding_opened":
            return f"found: {body['sentence']}" + (f"; {body['advice']}" if body["advice"] else "")
        case "finding_closed":
            return f"over: {body['sentence']}"
        case "job_noted":
            return str(body["message"])
        case "job_suspended" | "job_resumed" | "job_updated":
            return f"{event.kind.removeprefix('job_')} by {body['by']}"
        case _:
            return event.kind.replace("_", " ")
