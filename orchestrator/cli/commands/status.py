"""`orch status` and `orch wait`: one job, a matrix, or a list."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.api.matrix_views import MatrixView
from orchestrator.cli.commands.selecting import (
    LIVE_STATES,
    WAIT,
    DryRun,
    Jobs,
    Labels,
    Name,
    States,
    User,
    job_or_matrix,
    meant,
    selection,
    user_name,
    wanted_states,
    with_labels,
)
from orchestrator.cli.commands.shared import Json, Quiet, takes
from orchestrator.cli.render.jobs import job_lines
from orchestrator.cli.session import Session, print_json
from orchestrator.cli.times import parse_span_within, parse_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.client import Client
    from orchestrator.api.queue_views import OutlookView
    from orchestrator.api.views import JobList, JobView


RECENT_SECONDS = 86400.0
RECENT_JOBS = 50
"""Most ended jobs that are read for the short list: a daemon has thousands, and status is called often."""

MAX_WAITING = 500
"""Most waiting jobs in the short list: a queue may have a hundred thousand."""

WAITING_STATES = ("PENDING",)
MORE = f"only the newest {MAX_WAITING} jobs that wait are listed; `orch status --state PENDING` lists all, `orch queue` their order"


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """Options of `status`."""

    job: Annotated[str | None, typer.Argument(metavar="JOB", help="One job in full; none lists them.")] = None
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep running and print changes.")] = False
    user: Annotated[
        str | None, typer.Option("--user", "-u", metavar="USER", help="Only this user's jobs; `me` for your own.")
    ] = None
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state", "-s", metavar="STATE", help="Only in this state; a,b for several, `all` for every one."
        ),
    ] = None
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only jobs submitted since: 2h, or 2026-11-20T14:30.")
    ] = None
    labels: Labels = None
    name: Name = None
    json: Json = False

    @property
    def chooses(self) -> bool:
        """Whether an option selects among jobs."""
        return bool(self.user or self.states or self.since or self.labels or self.name)


def show_status(session: Session, options: StatusOptions) -> int:
    """Show one job in full, or a table of jobs."""
    if options.job is not None:
        if options.chooses:
            raise BadRequestError(
                "--user, --state, --since, --label and --name choose among jobs",
                hint="leave them out, or leave out JOB",
            )
        return _show_job(session, options.job, options)
    return _show_jobs(session, options)


def _show_job(session: Session, ref: str, options: StatusOptions) -> int:
    from orchestrator.cli.render.jobs import detail_lines

    client = session.client()
    job = job_or_matrix(client, ref)
    if isinstance(job, MatrixView):
        from orchestrator.cli.commands.matrix import show_matrix

        return show_matrix(session, job.id, watch=options.watch, as_json=options.json)
    session.note_which(ref, job)

    def read() -> Shown:
        found = client.job(job.id)
        return Shown(found, _outlook(client, (found,)))

    def render(found: Shown) -> list[str]:
        now = time.time()
        return detail_lines(session.console, found.view, now, _places(found.outlook, now).get(job.id, ""))

    if options.watch:
        from orchestrator.cli.commands.logs import watch_view

        watch_view(
            session,
            read,
            render,
            job_ids=(job.id,),
            ended=lambda found: found.view.is_terminal,
            as_json=_job_json if options.json else None,
        )
        return EXIT_OK
    found = Shown(job, _outlook(client, (job,)))
    if options.json:
        print_json(session, _job_json(found))
    else:
        _print(session, render(found))
    return EXIT_OK


class Shown(NamedTuple):
    """A job or a list of jobs, with the outlook of those that wait; None if none waits."""

    view: Any
    outlook: OutlookView | None


def _outlook(client: Client, jobs: Sequence[JobView]) -> OutlookView | None:
    """Return when jobs start; None, without a request, if none waits, as is usual."""
    return client.outlook() if any(job.state in WAITING_STATES for job in jobs) else None


def _places(outlook: OutlookView | None, now: float) -> dict[str, str]:
    if outlook is None:
        return {}
    from orchestrator.cli.render.jobs import places

    return places(outlook, now)


def _job_json(shown: Shown) -> object:
    job, outlook = shown.view, shown.outlook
    if outlook is None or job.id not in outlook.order:
        return job.to_json()
    return {
        **job.to_json(),
        "place": outlook.order.index(job.id) + 1,
        "expected_start": outlook.starts.get(job.id),
    }


def _list_json(shown: Shown) -> object:
    outlook, jobs = shown.outlook, shown.view
    if outlook is None:
        return jobs.to_json()
    return {**jobs.to_json(), "order": list(outlook.order), "expected_starts": dict(outlook.starts)}


def _print(session: Session, lines: Sequence[str]) -> None:
    for line in lines:
        session.console.print(line)


def _show_jobs(session: Session, options: StatusOptions) -> int:
    client = session.client()
    user = user_name(session, options.user)
    states = wanted_states(options.states or ())
    since = None if options.since is None else parse_time(options.since, "--since", time.time())
    recent = not options.states and since is None
    none = "no job matches" if options.chooses else "no jobs; `orch submit job.yaml` makes one"

    def chosen() -> JobList:
        if recent:
            found = _live_and_recent(client, user, None if options.json or options.chooses else MAX_WAITING)
        else:
            found = client.jobs(user=user, states=states, since=since)
        if not (options.labels or options.name):
            return found
        return replace(found, jobs=with_labels(found.jobs, options.labels or (), options.name))

    def read() -> Shown:
        found = chosen()
        return Shown(found, _outlook(client, found.jobs))

    def render(shown: Shown) -> list[str]:
        found, now = shown.view, time.time()
        lines = job_lines(session.console, found.jobs, now, _places(shown.outlook, now)) or [none]
        return [*lines, *([MORE] if found.more else [])]

    if options.watch:
        from orchestrator.cli.commands.logs import watch_view

        watch_view(session, read, render, as_json=_list_json if options.json else None)
    elif options.json:
        print_json(session, _list_json(read()))
    else:
        _print(session, render(read()))
    if not options.watch:  # damaged records, a full disk: what the list itself cannot show
        for problem in client.health().problems:
            session.console.note(f"note: {problem}")
    return EXIT_OK


def _live_and_recent(client: Client, user: str | None, most_waiting: int | None) -> JobList:
    """Return the jobs that have not ended, at most ``most_waiting`` waiting (None: all), and the newest ended ones.

    ``more``: there are other waiting jobs.
    """
    from orchestrator.api.views import TERMINAL_STATES

    waiting = client.jobs(user=user, states=WAITING_STATES, limit=most_waiting)
    live = client.jobs(user=user, states=[state for state in LIVE_STATES if state not in WAITING_STATES])
    ended = client.jobs(user=user, states=sorted(TERMINAL_STATES), limit=RECENT_JOBS)
    oldest = time.time() - RECENT_SECONDS
    recent = [job for job in ended.jobs if job.ended_at is None or job.ended_at >= oldest]
    # A job that ended between two answers is in both: the later one counts.
    by_id = {job.id: job for job in (*waiting.jobs, *live.jobs, *recent)}
    return replace(waiting, jobs=tuple(sorted(by_id.values(), key=lambda job: -job.submitted_at)))


MAX_SECONDS = 365 * 86_400.0


@takes(StatusOptions)
def status(options: StatusOptions) -> int:
    """Show the state of jobs: those that have not ended, and the newest of those that ended in the last day.

    A job that waits is shown with its place in the queue and its expected start; `orch explain` shows more.
    With --json: an object with `jobs`, or the JOB's object; with --watch, one such object per line for each change.
    If jobs wait, `order` has the ids of the first jobs of the queue and `expected_starts` their expected starts; a JOB that waits has `place` and `expected_start`.
    """
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
    from orchestrator.cli.commands.logs import wait_jobs

    seconds = None if timeout is None else parse_span_within(timeout, "--timeout", least=0.0, most=MAX_SECONDS)
    found = selection(
        jobs, user=user, state=state, label=label, name=name, dry_run=dry_run, yes=True, json=json, quiet=quiet
    )
    refs = meant(found, WAIT)
    if refs is None:
        return EXIT_OK
    as_array = len(found.refs) != 1
    return wait_jobs(found.session, refs, as_json=json, as_array=as_array, timeout_seconds=seconds)
