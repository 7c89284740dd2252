"""`orch events`, `explain` and `checkpoints`: a job's history, the reason of its state, its checkpoints."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_JOB_FAILED, EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Job, Json, complete_job
from orchestrator.cli.console import clean
from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.cli.session import Session, answer
from orchestrator.cli.times import parse_time
from orchestrator.units import age, clock, metric, number, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.client import Client
    from orchestrator.api.views import AuditEntry, CheckpointView, EventView, JobView

EXPLAINED_EVENTS = 8
EVENT_COLUMNS: tuple[Column[EventView], ...] = (
    Column("TIME", lambda event: clock(event.at, fraction=True), weight=900),
    Column("ATTEMPT", lambda event: event.attempt, weight=400, right=True),
    Column("EVENT", lambda event: event.kind, weight=1000, styles=("bold",)),
    Column("WHAT", lambda event: event.summary, weight=800, shrink=True),
)

AUDIT_LINES = 1000
AUDIT_COLUMNS: tuple[Column[AuditEntry], ...] = (
    Column("TIME", lambda entry: clock(entry.at), weight=900),
    Column("USER", lambda entry: entry.user or "-", weight=900, styles=("bold",)),
    Column("FROM", lambda entry: entry.source, weight=600),
    Column("REQUEST", lambda entry: entry.action, weight=800, shrink=True),
    Column("JOB", lambda entry: entry.job, weight=700),
    Column("RESULT", lambda entry: Cell(entry.result, () if entry.status < 400 else ("red",)), weight=850),
    Column("DETAIL", lambda entry: entry.detail, weight=300, shrink=True),
)


def _checkpoint_state(item: CheckpointView) -> Cell:
    if item.problem:
        return Cell("broken", ("red",))
    return Cell("verified" if item.valid else item.location, ("green",) if item.valid else ())


CHECKPOINT_COLUMNS: tuple[Column[CheckpointView], ...] = (
    Column("STEP", lambda item: item.step, weight=1000, right=True, styles=("bold",)),
    Column("SAVED", lambda item: clock(item.at) if item.at else "", weight=500),
    Column("AGE", lambda item: age(time.time() - item.at) if item.at else "", weight=700, right=True),
    Column("SIZE", lambda item: size(item.size_bytes), weight=600, right=True),
    Column("SCORE", lambda item: number(item.score) + (" best" if item.is_best else ""), weight=650, right=True),
    Column("STATE", _checkpoint_state, weight=900),
    Column("METRICS", lambda item: " ".join(f"{n} {metric(n, v)}" for n, v in item.metrics.items()), weight=400),
    Column("PATH", lambda item: item.path, weight=800, shrink=True),
)


def events(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="An id, the beginning of one, or a name.",
            autocompletion=complete_job,
            show_default=False,
        ),
    ] = None,
    *,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit", help="Without JOB: the audit log, who has sent which request from where. For the owner."
        ),
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job has ended.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="Only the last events.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only events since: 10m, or 2026-11-20T14:30.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document; with --follow one object a line.")
    ] = False,
) -> int:
    """Show a job's history, oldest first: all of it, or with --tail its last events. With --audit: the audit log."""
    start = 0.0 if since is None else parse_time(since, "--since", time.time())
    session = Session()
    client = session.client()
    if audit == (job is not None) or (audit and follow):
        raise BadRequestError(
            "give a JOB, or --audit without one and without --follow", hint="`orch events JOB` shows a job's history"
        )
    if job is None:
        entries = client.audit(limit=AUDIT_LINES if tail is None else tail, since=start)
        lines = render_table(session.console, AUDIT_COLUMNS, entries)
        return answer(session, lines, {"entries": [entry.to_json() for entry in entries]}, as_json=json)
    found = session.job(job)
    if follow:
        return _follow_events(session, client, found, tail=tail, since=start, as_json=json)
    history = [event for event in client.events(found.id, tail=tail) if event.at >= start]
    lines = render_table(session.console, EVENT_COLUMNS, history)
    return answer(session, lines, {"job_id": found.id, "events": [event.to_json() for event in history]}, as_json=json)


def _follow_events(
    session: Session, client: Client, job: JobView, *, tail: int | None, since: float, as_json: bool
) -> int:
    import json

    from orchestrator.api.transport import following

    last = 0
    if tail is not None:
        first = client.events(job.id, tail=max(1, tail))[0].sequence
        last = first if tail == 0 else first - 1

    def read() -> tuple[JobView, Sequence[EventView]]:
        # Read the job first: the events up to its end are then included.
        return client.job(job.id), client.events(job.id, after=last)

    for now, fresh in following.watch(client, read, job_ids=[job.id], patience=session.patience()):
        for event in fresh:
            last = event.sequence
            if event.at < since:
                continue
            text = "  ".join(cell for column in EVENT_COLUMNS if (cell := column.cell(event).text))
            fields = {"job_id": job.id, **event.to_json()}
            session.console.print(json.dumps(fields, ensure_ascii=False) if as_json else text)
        session.console.flush()
        if now.is_terminal:
            break
    return EXIT_OK


def explain(job: Job, json: Json = False) -> int:
    """Explain a job's state: its reason, when it is expected to start and why, the jobs ahead of it, its last events."""
    from orchestrator.cli.render.jobs import detail_lines, outlook_lines

    session = Session()
    client = session.client()
    found = session.job(job)
    history = client.events(found.id, tail=None if json else EXPLAINED_EVENTS)
    outlook = client.outlook(found.id) if found.state == "PENDING" else None
    now = time.time()
    lines = [
        *detail_lines(session.console, found, now),
        *([] if outlook is None else outlook_lines(session.console, outlook, now)),
        "",
        "what happened last:",
        *render_table(session.console, EVENT_COLUMNS, history),
    ]
    value = {
        "job_id": found.id,
        "job": found.to_json(),
        "ahead": list(outlook.ahead) if outlook else [],
        "outlook": outlook.to_json() if outlook else None,
        "events": [event.to_json() for event in history],
    }
    return answer(session, lines, value, as_json=json)


def checkpoints(
    job: Job,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte; exit code 1 where a checkpoint is broken.")
    ] = False,
    json: Json = False,
) -> int:
    """List a job's checkpoints, newest first."""
    session = Session()
    client = session.client()
    found = session.job(job)
    saved = client.checkpoints(found.id, verify=verify)
    lines = render_table(session.console, CHECKPOINT_COLUMNS, saved) or ["no checkpoint yet"]
    lines += [f"step {item.step} is broken: {clean(item.problem)}" for item in saved if item.problem]
    value = {"job_id": found.id, "checkpoints": [item.to_json() for item in saved]}
    code = EXIT_JOB_FAILED if any(item.valid is False for item in saved) else EXIT_OK
    return answer(session, lines, value, as_json=json, code=code)
