"""`orch status` and `orch wait`: the states of jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.api.errors import EXIT_OK
from orchestrator.cli.commands.jobs.selecting import WAIT, DryRun, Jobs, Labels, Name, States, User, meant, selection
from orchestrator.cli.commands.shared import Json, Quiet
from orchestrator.cli.session import Session
from orchestrator.cli.status_view import StatusOptions, show_status

MAX_SECONDS = 365 * 86_400.0


def status(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="One job in full; none lists them.")] = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep running and print changes.")] = False,
    user: Annotated[
        str | None, typer.Option("--user", "-u", metavar="USER", help="Only this user's jobs; `me` for your own.")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state", "-s", metavar="STATE", help="Only in this state; a,b for several, `all` for every one."
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only jobs submitted since: 2h, or 2026-11-20T14:30.")
    ] = None,
    label: Labels = None,
    name: Name = None,
    json: Json = False,
) -> int:
    """Show the state of jobs: those that have not ended, and the newest of those that ended in the last day.

    A job that waits is shown with its place in the queue and its expected start; `orch explain` shows more.
    With --json: an object with `jobs`, or the JOB's object; with --watch, one such object per line for each change.
    If jobs wait, `order` has the ids of the first jobs of the queue and `expected_starts` their expected starts; a JOB that waits has `place` and `expected_start`.
    """
    options = StatusOptions(
        job=job,
        watch=watch,
        user=user,
        states=tuple(state or ()),
        since=since,
        labels=tuple(label or ()),
        name=name,
        json=json,
    )
    return show_status(Session(), options)


def wait(
    jobs: Jobs = None,
    *,
    user: User = None,
    state: States = None,
    label: Labels = None,
    name: Name = None,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="SPAN", help="Give up after this time, with exit code 7: 30s, 2h."),
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Wait until jobs have ended; exit code 0 when all succeeded, 7 when --timeout has passed, else 1.

    Options choose among jobs that have not ended. Also waits while the daemon restarts. With --json: the job's object, or an array for several.
    """
    from orchestrator.cli.live import wait_jobs
    from orchestrator.cli.times import parse_span_within

    seconds = None if timeout is None else parse_span_within(timeout, "--timeout", least=0.0, most=MAX_SECONDS)
    session = Session(quiet=quiet)
    found = selection(jobs, user, state, label, name, dry_run=dry_run, json=json)
    refs = meant(session, found, WAIT, asks=False)
    if refs is None:
        return EXIT_OK
    as_array = len(found.refs) != 1
    return wait_jobs(session, refs, as_json=json, as_array=as_array, timeout_seconds=seconds)
