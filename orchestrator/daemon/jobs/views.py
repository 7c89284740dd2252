"""Converts a job's record and its newest progress, and its stored events, to the API's views. Pure."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api import views as v
from orchestrator.api.matrix_views import MatrixCellView
from orchestrator.core import events as ev
from orchestrator.core.diagnosis.definitions import PRECEDENCE
from orchestrator.core.diagnosis.health import GATHERING
from orchestrator.core.events import FirstStep
from orchestrator.core.facts.faults import RecordRestored
from orchestrator.core.facts.findings import (
    Finding,
    NoStep,
    RankAtBreakpoint,
    RankStopped,
    finding_to_dict,
    key_of,
    linked,
    unmeasured_to_dict,
)
from orchestrator.core.facts.reasons import StopOrdered, is_pruned
from orchestrator.core.job.record import recovery_seconds
from orchestrator.core.states import JobState
from orchestrator.core.stored import event_body
from orchestrator.daemon.jobs.progress import no_real_gpu
from orchestrator.spec.reader.reading import to_dict
from orchestrator.units import duration, plural, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.core.diagnosis.health import RankLook
    from orchestrator.core.diagnosis.observation import Pace, StallSeen
    from orchestrator.core.estimates import TimeLeft
    from orchestrator.core.events import LeftOut
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.job.record import Attempt, Job
    from orchestrator.daemon.jobs.progress import JobProgress
    from orchestrator.store.records import StoredEvent

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
    """Return text such as ``3 files, 2.2 MiB left out by .gitignore``."""
    files, by = left_out["files"], " and ".join(left_out["by"])
    count = f"{'more than ' if left_out['more'] else ''}{files} file{'' if files == 1 else 's'}"
    return f"{count}, {size(left_out['size_bytes'])} left out by {by}"


def _clock_step(seconds: float) -> str:
    way = "back" if seconds < 0 else "forward"
    return f"the daemon's clock moved {way} by {duration(abs(seconds))}, and all that is due with it"


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
            return _clock_step(body["seconds"])
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


SHORTEST_STEP: Final = 1e-9
"""Seconds; a shorter reported duration was not measured."""


def job_view(
    job: Job,
    progress: JobProgress | None,
    waiting: Fact | None,
    log_dir: str,
    balance: dict[str, Any] | None = None,
    *,
    outputs_dir: str = "",
    stall: StallSeen | None = None,
    findings: Sequence[Finding] | None = None,
    left: TimeLeft | None = None,
    docs_url: str = "",
) -> v.JobView:
    """Return the whole view of a job. ``waiting`` is why a pending job waits, ``findings`` have the newest figures.

    Open findings that ``findings`` lacks are shown without figures (None: with those of their opening). Runbooks are addresses
    below ``docs_url``.
    """
    paces = _paces(job, progress) if progress and job.state is JobState.RUNNING else {}
    reason = waiting if waiting and job.state is JobState.PENDING else job.reason
    return v.JobView(
        id=job.id,
        name=job.name,
        user=job.submission.user,
        uid=job.submission.uid,
        queue=job.spec.queue,
        priority=job.priority,
        state=job.state.value,
        reason=reason.sentence(),
        fact=reason.to_dict(),
        reason_code=_reason_code(job),
        submitted_at=job.submission.submitted_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        attempt=job.attempt_number,
        attempts=tuple(_attempt(a) for a in job.attempts),
        restarts=sum(job.restarts.values()),
        restarts_by_class=dict(job.restarts),
        num_workers=job.num_workers,
        gpus=tuple(_rank(job, seat.rank, paces) for seat in job.seats),
        resources=_resources(job),
        progress=_progress(job, progress, left, still=stall is not None),
        stall=_stall(stall) if job.state is JobState.RUNNING else "",
        checkpoint=_checkpoint(job),
        quarantined=tuple(sorted(progress.quarantined)) if progress else (),
        degraded=job.degraded,
        exit_code=job.exit_code,
        failure=_failure(job),
        timings=_timings(job),
        working_dir=job.submission.work_dir,
        labels=dict(job.spec.labels),
        log_dir=log_dir,
        outputs_dir=outputs_dir,
        balance=balance,
        findings=_findings(job, findings, docs_url),
        depends_on={needed.job_id: needed.on.value for needed in job.submission.prerequisites},
        version=job.version,
        matrix=_matrix(job),
    )


def _matrix(job: Job) -> MatrixCellView | None:
    cell = job.submission.matrix
    if cell is None:
        return None
    return MatrixCellView(
        id=cell.matrix_id,
        name=cell.name,
        index=cell.index,
        count=cell.count,
        values=dict(cell.values),
        search=cell.search,
        pruned=job.state.is_terminal and is_pruned(job.reason),
    )


def _resources(job: Job) -> dict[str, Any]:
    resources = to_dict(job.spec)["resources"]
    return resources if isinstance(resources, dict) else {}


def _reason_code(job: Job) -> str:
    if job.failure is not None and job.state in (JobState.FAILED, JobState.RECOVERING):
        return job.failure.code
    return job.stop.purpose.value if job.stop else ""


def _attempt(attempt: Attempt) -> v.AttemptView:
    failure = attempt.failure
    return v.AttemptView(
        number=attempt.number,
        state=attempt.state.value,
        started_at=attempt.started_at,
        running_at=attempt.running_at,
        ended_at=attempt.ended_at,
        failure_class=failure.failure_class.value if failure else None,
        reason=failure.sentence() if failure else "",
        fact=failure.cause.to_dict() if failure else None,
    )


def _paces(job: Job, progress: JobProgress) -> Mapping[int, Pace]:
    return {pace.rank: pace for pace in progress.paces(busy_is_work=no_real_gpu(job))}


def _rank(job: Job, rank: int, paces: Mapping[int, Pace]) -> v.RankView:
    seat = job.seats[rank]
    pid = job.pids[rank] if rank < len(job.pids) else None
    pace = paces.get(rank)
    return v.RankView(
        rank=rank,
        node=seat.node_name,
        gpu_uuids=seat.gpu_uuids,
        pid=pid,
        step_seconds=pace.step_seconds if pace else None,
        own_seconds=pace.own_seconds if pace else None,
    )


def _findings(job: Job, newest: Sequence[Finding] | None, docs_url: str) -> tuple[v.FindingView, ...]:
    """Return the job's open findings with their newest figures, the most severe first."""
    measured = {key_of(one): one for one in newest or ()}
    found = [one for one in job.findings if isinstance(one, Finding)]
    found.sort(key=lambda one: (PRECEDENCE[one.kind], one.rank or 0))
    described = [
        unmeasured_to_dict(one, job.id)
        if newest is not None and key_of(one) not in measured
        else finding_to_dict(measured.get(key_of(one), one), job.id)
        for one in found
    ]
    return tuple(v.FindingView(**{**one, "runbook": linked(one["runbook"], docs_url)}) for one in described)


def _stall(stall: StallSeen | None) -> str:
    """Return the present activity of a job that makes no step; empty where it makes steps, or does not report them."""
    if stall is None or not (stall.late.by_steps or stall.seen.sign in GATHERING):
        return ""
    return f"{stall.late.sentence()}; {stall.seen.sentence()}"


def _progress(job: Job, progress: JobProgress | None, left: TimeLeft | None, *, still: bool) -> v.ProgressView | None:
    leader = progress.leader if progress else None
    if leader is None:
        return None
    fraction = min(1.0, leader.step / leader.total_steps) if leader.step and leader.total_steps else None
    rate = 1.0 / leader.step_seconds if leader.step_seconds and leader.step_seconds > SHORTEST_STEP else None
    stuck = still or any(isinstance(one, NoStep | RankStopped | RankAtBreakpoint) for one in job.findings)
    if stuck:
        rate = None  # the rate is of the past
    eta = low = high = None
    running = job.state is JobState.RUNNING and not stuck
    if running and left is not None:
        eta, low, high = left.seconds, left.low, left.high
    elif running and rate and leader.total_steps and leader.step is not None:
        eta = max(0.0, (leader.total_steps - leader.step) / rate)
    return v.ProgressView(
        step=leader.step,
        total_steps=leader.total_steps,
        epoch=None if leader.epoch is None else int(leader.epoch),
        phase=leader.phase or None,
        fraction=fraction,
        steps_per_second=rate,
        eta_seconds=eta,
        eta_low_seconds=low,
        eta_high_seconds=high,
        metrics=dict(leader.metrics),
        updated_at=leader.last_report_at,
    )


def _checkpoint(job: Job) -> v.CheckpointRef | None:
    if job.checkpoints.at is None:
        return None
    # A snapshot newer than the checkpoint on storage is in the memory of its node and has no path.
    path = job.checkpoints.path if job.checkpoints.durable_step == job.checkpoints.step else ""
    return v.CheckpointRef(step=job.checkpoints.step, at=job.checkpoints.at, path=path)


def _failure(job: Job) -> v.FailureView | None:
    failure = job.failure
    if failure is None:
        return None
    return v.FailureView(
        failure_class=failure.failure_class.value,
        sentence=failure.sentence(),
        code=failure.code,
        fact=failure.cause.to_dict(),
        refusal=failure.refusal.to_dict() if failure.refusal else None,
        rank=failure.rank,
        log_tail=failure.log_tail,
        advice=failure.advice(job.id),
    )


def _timings(job: Job) -> v.TimingsView:
    whole = job.whole
    listed = [recovery_seconds(before, after) for before, after in itertools.pairwise(job.attempts)]
    return v.TimingsView(
        queued_seconds=None if whole.ordered_at is None else whole.ordered_at - job.submission.submitted_at,
        submit_to_first_step_seconds=None
        if whole.first_step_at is None
        else whole.first_step_at - job.submission.submitted_at,
        recovery_seconds=tuple(round(seconds, 4) for seconds in listed if seconds is not None),
        recoveries=whole.recoveries,
        recovery_seconds_total=round(whole.recovery_seconds, 4),
        steps_lost=whole.steps_lost,
    )


def rank_stacks(rank: int, look: RankLook | None) -> v.RankStacksView:
    """Return one rank's processes; ``look`` is None for a rank that was not reached."""
    if look is None:
        return v.RankStacksView(rank=rank, problem="it was not reached: it has just ended, or its node does not answer")
    threads = tuple(v.ThreadView(name=t.name, frames=tuple(map(str, t.frames))) for t in look.threads)
    return v.RankStacksView(
        rank=rank,
        pid=look.pid,
        state=look.state,
        cpu_seconds=look.cpu_seconds,
        waits_in=look.wait_name,
        threads=threads,
        problem=look.problem,
    )
