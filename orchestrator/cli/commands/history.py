"""`orch events`, `explain` and `checkpoints`: a job's history, the reason of its state, its checkpoints."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_JOB_FAILED, EXIT_OK, BadRequestError
from orchestrator.cli.commands.selecting import note_which
from orchestrator.cli.commands.shared import Job, Json, complete_job
from orchestrator.cli.console import clean
from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.cli.session import Session, print_json
from orchestrator.cli.times import parse_time
from orchestrator.units import age, clock, metric, number, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.client import Client
    from orchestrator.api.views import AuditEntry, CheckpointView, EventView, JobView

EXPLAINED_EVENTS = 8
EVENT_COLUMNS = (
    Column("TIME", weight=900),
    Column("ATTEMPT", weight=400, right=True),
    Column("EVENT", weight=1000),
    Column("WHAT", weight=800, shrink=True),
)

AUDIT_LINES = 1000
AUDIT_COLUMNS = (
    Column("TIME", weight=900),
    Column("USER", weight=900),
    Column("FROM", weight=600),
    Column("REQUEST", weight=800, shrink=True),
    Column("JOB", weight=700),
    Column("RESULT", weight=850),
    Column("DETAIL", weight=300, shrink=True),
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
        return _audit(session, client.audit(limit=AUDIT_LINES if tail is None else tail, since=start), as_json=json)
    found = client.job(job)
    note_which(session, job, found)
    if follow:
        return _follow_events(session, client, found, tail=tail, since=start, as_json=json)
    history = [event for event in client.events(found.id, tail=tail) if event.at >= start]
    if json:
        print_json(session, {"job_id": found.id, "events": [event.to_json() for event in history]})
    else:
        _print_events(session, history)
    return EXIT_OK


def _audit(session: Session, entries: Sequence[AuditEntry], *, as_json: bool) -> int:
    if as_json:
        print_json(session, {"entries": [entry.to_json() for entry in entries]})
        return EXIT_OK
    rows = [
        [
            Cell(clock(entry.at)),
            Cell(clean(entry.user or "-"), ("bold",)),
            Cell(clean(entry.source)),
            Cell(clean(entry.action)),
            Cell(clean(entry.job)),
            Cell(clean(entry.result), () if entry.status < 400 else ("red",)),
            Cell(clean(entry.detail)),
        ]
        for entry in entries
    ]
    for line in render_table(session.console, AUDIT_COLUMNS, rows):
        session.console.print(line)
    return EXIT_OK


def _print_events(session: Session, history: Sequence[EventView]) -> None:
    rows = [_event_row(event) for event in history]
    for line in render_table(session.console, EVENT_COLUMNS, rows):
        session.console.print(line)


def _event_row(event: EventView) -> list[Cell]:
    attempt = "" if event.attempt is None else str(event.attempt)
    return [
        Cell(f"{clock(event.at)}.{int(event.at % 1 * 1000):03d}"),
        Cell(attempt),
        Cell(event.kind, ("bold",)),
        Cell(clean(event.summary)),
    ]


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
            cells = _event_row(event)
            text = "  ".join(cell.text for cell in cells if cell.text)
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
    found = client.job(job)
    note_which(session, job, found)
    history = client.events(found.id, tail=None if json else EXPLAINED_EVENTS)
    outlook = client.outlook(found.id) if found.state == "PENDING" else None
    ahead = list(outlook.ahead) if outlook else []
    if json:
        print_json(
            session,
            {
                "job_id": found.id,
                "job": found.to_json(),
                "ahead": ahead,
                "outlook": outlook.to_json() if outlook else None,
                "events": [event.to_json() for event in history],
            },
        )
        return EXIT_OK
    for line in detail_lines(session.console, found, time.time()):
        session.console.print(line)
    for line in [] if outlook is None else outlook_lines(session.console, outlook, time.time()):
        session.console.print(line)
    session.console.print("\nwhat happened last:")
    _print_events(session, history)
    return EXIT_OK


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
    found = client.job(job)
    note_which(session, job, found)
    saved = client.checkpoints(found.id, verify=verify)
    if json:
        print_json(session, {"job_id": found.id, "checkpoints": [item.to_json() for item in saved]})
    else:
        columns = (
            Column("STEP", weight=1000, right=True),
            Column("SAVED", weight=500),
            Column("AGE", weight=700, right=True),
            Column("SIZE", weight=600, right=True),
            Column("SCORE", weight=650, right=True),
            Column("STATE", weight=900),
            Column("METRICS", weight=400),
            Column("PATH", weight=800, shrink=True),
        )
        now = time.time()
        rows = [_checkpoint_row(item, now) for item in saved]
        for line in render_table(session.console, columns, rows) or ["no checkpoint yet"]:
            session.console.print(line)
        for item in saved:
            if item.problem:
                session.console.print(f"step {item.step} is broken: {clean(item.problem)}")
    return EXIT_JOB_FAILED if any(item.valid is False for item in saved) else EXIT_OK


def _checkpoint_row(item: CheckpointView, now: float) -> list[Cell]:
    if item.problem:
        state = Cell("broken", ("red",))
    else:
        state = Cell("verified" if item.valid else item.location, ("green",) if item.valid else ())
    metrics = " ".join(f"{clean(name)} {metric(name, value)}" for name, value in item.metrics.items())
    return [
        Cell(str(item.step), ("bold",)),
        Cell(clock(item.at) if item.at else ""),
        Cell(age(now - item.at) if item.at else ""),
        Cell("" if item.size_bytes is None else size(item.size_bytes)),
        Cell(("" if item.score is None else number(item.score)) + (" best" if item.is_best else "")),
        state,
        Cell(metrics),
        Cell(clean(item.path)),
    ]
