"""`orch queue`: the order of waiting jobs, and the shares of queues and users; `orch usage`: what was used."""

from __future__ import annotations

import csv as csv_module
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Json, finite
from orchestrator.cli.render.jobs import gpus_text
from orchestrator.cli.render.table import Column, render_table
from orchestrator.cli.session import Session, answer, print_json
from orchestrator.cli.times import parse_time
from orchestrator.units import age, number, percent, spreadsheet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.api.queue_views import QueueShares, QueueView, UserShareView
    from orchestrator.api.usage_views import UsageReport, UsageRow
    from orchestrator.api.views import JobView

USERS: tuple[Column[UserShareView], ...] = (
    Column("USER", lambda user: user.user, weight=1000, styles=("bold",)),
    Column("QUEUE", lambda user: user.queue, weight=500),
    Column("GPUS", lambda user: number(round(user.gpus, 2)), weight=900, right=True),
    Column("SHARE", lambda user: percent(user.share), weight=800, right=True),
    Column("RUNNING", lambda user: user.running, weight=300, right=True),
    Column("WAITING", lambda user: user.waiting, weight=600, right=True),
)


def show_queue(session: Session, *, as_json: bool) -> int:
    """Print the waiting jobs in the scheduler's order, then the queues, and the users if there are several."""
    client = session.client()
    shares = client.queue_shares()
    jobs = in_order(shares, client.jobs(states=["PENDING"]).jobs)
    if as_json:
        known = dict(client.outlook().starts) if jobs else {}
        print_json(session, {"jobs": [job.to_json() for job in jobs], **_shares(shares), "expected_starts": known})
        return EXIT_OK
    if not jobs:
        session.console.print("nothing waits")
    starts = client.outlook().starts if jobs else {}
    tables = [render_table(session.console, _job_columns(starts, users=len(shares.users) > 1), jobs)]
    tables.append(render_table(session.console, _queue_columns(shares), shares.queues))
    if len(shares.users) > 1:
        tables.append(render_table(session.console, USERS, shares.users))
    for place, lines in enumerate(tables):
        for line in ["", *lines] if place and lines else lines:
            session.console.print(line)
    return EXIT_OK


def in_order(shares: QueueShares, jobs: Sequence[JobView]) -> list[JobView]:
    """Return the jobs in the scheduler's order; those that wait for other jobs come last, by priority and arrival."""
    places = {job_id: place for place, job_id in enumerate(shares.order)}
    last = len(places)
    return sorted(jobs, key=lambda job: (places.get(job.id, last), -job.priority, job.submitted_at))


def _shares(shares: QueueShares) -> dict[str, object]:
    plain = shares.to_json()
    return {"queues": plain["queues"], "users": plain["users"]}


def _job_columns(starts: Mapping[str, float], *, users: bool) -> tuple[Column[JobView], ...]:
    now = time.time()

    def start(job: JobView) -> str:
        return f"in {age(max(0.0, starts[job.id] - now))}" if job.id in starts else ""

    return (
        Column("JOB", lambda job: job.id, weight=1000, styles=("bold",)),
        Column("QUEUE", lambda job: job.queue, weight=500),
        Column("USER", lambda job: job.user if users else "", weight=300),
        Column("PRIORITY", lambda job: job.priority, weight=800, right=True),
        Column("GPUS", gpus_text, weight=400, right=True),
        Column("WAITS", lambda job: age(now - job.submitted_at), weight=600, right=True),
        Column("STARTS", start, weight=650, right=True),
        Column("REASON", lambda job: job.reason, weight=700, shrink=True, styles=("dim",)),
    )


def _queue_columns(shares: QueueShares) -> tuple[Column[QueueView], ...]:
    parents = {each.name: each.parent for each in shares.queues}

    def indented(queue: QueueView) -> str:
        depth, parent = 0, queue.parent
        while parent and depth < len(parents):
            depth, parent = depth + 1, parents.get(parent, "")
        return "  " * depth + queue.name

    return (
        Column("QUEUE", indented, weight=1000, styles=("bold",)),
        Column("GPUS", lambda queue: number(round(queue.gpus, 2)), weight=900, right=True),
        Column("FAIR SHARE", lambda queue: number(round(queue.fair_share, 2)), weight=800, right=True),
        Column("GUARANTEED", lambda queue: queue.guaranteed, weight=700, right=True),
        Column("MAXIMUM", lambda queue: "-" if queue.maximum is None else queue.maximum, weight=700, right=True),
        Column("WEIGHT", lambda queue: f"{queue.weight:g}", weight=500, right=True),
        Column("SHARE", lambda queue: percent(queue.share), weight=400, right=True),
        Column("RUNNING", lambda queue: queue.running, weight=300, right=True),
        Column("WAITING", lambda queue: queue.waiting, weight=600, right=True),
    )


queue = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True)


@queue.callback()
def list_queue(context: typer.Context, json: Json = False) -> int:
    """List waiting jobs in scheduling order, and the shares of queues and users.

    With --json: `jobs`, `queues` and `users`. A share is a part of the cluster: what is held now, and the mean of the past.
    """
    return EXIT_OK if context.invoked_subcommand is not None else show_queue(Session(), as_json=json)


@queue.command("set")
def set_queue(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The queue; created if it does not exist.")],
    *,
    guaranteed: Annotated[
        int | None, typer.Option("--guaranteed", metavar="GPUS", help="GPUs that are served before others borrow.")
    ] = None,
    maximum: Annotated[
        str | None, typer.Option("--maximum", metavar="GPUS", help="GPUs that it never exceeds; `none` for no maximum.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option("--weight", metavar="W", help="Its part of what is free beyond guarantees.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="QUEUE", help="The queue that it is a part of; `none` for none.")
    ] = None,
    json: Json = False,
) -> int:
    """Change or create a queue, at once and across restarts of the daemon. Only for the daemon's owner."""
    if guaranteed is None and maximum is None and weight is None and parent is None:
        raise BadRequestError("nothing to change was given", hint="for example --guaranteed 4 --maximum 8 --weight 2")
    session = Session()
    view = session.client().set_queue(
        name,
        guaranteed=guaranteed,
        maximum=_gpus(maximum),
        unbounded=maximum == "none",
        weight=weight,
        parent="" if parent == "none" else parent,
    )
    return answer(session, [_sentence(view)], view.to_json(), as_json=json)


def _gpus(text: str | None) -> int | None:
    if text is None or text == "none":
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 7:
        raise BadRequestError(f"--maximum {text!r} is not a whole number of GPUs", hint="for example 8, or none")
    return int(text)


def _sentence(view: QueueView) -> str:
    maximum = "no maximum" if view.maximum is None else f"a maximum of {view.maximum}"
    under = f" under {view.parent}" if view.parent else ""
    return f"queue {view.name}{under} has {view.guaranteed} guaranteed GPUs, {maximum} and weight {view.weight:g}"


PHASES = ("productive", "lost", "starting", "recovering", "checkpoint_stall", "draining", "uncommitted")


def _table(session: Session, report: UsageReport) -> list[str]:
    if not report.rows:
        return ["nothing was used in this time"]
    columns: list[Column[UsageRow]] = [
        *(Column(name.upper(), partial(_key, report, name), weight=1000) for name in report.by),
        Column("JOBS", lambda row: row.jobs, weight=400, right=True),
        Column("GPU HOURS", lambda row: _hours(row.gpu_hours), weight=900, right=True),
        Column("PRODUCTIVE", lambda row: _hours(row.phases.get("productive", 0.0)), weight=800, right=True),
        Column("LOST", lambda row: _hours(row.phases.get("lost", 0.0)), weight=800, right=True),
        Column("OVERHEAD", lambda row: _hours(_other(row)), weight=500, right=True),
        Column("OPEN", lambda row: _hours(row.phases.get("uncommitted", 0.0)), weight=300, right=True),
        Column("WAITING", lambda row: _hours(row.waiting_gpu_hours), weight=700, right=True),
        Column(
            "ENERGY kWh", lambda row: "" if row.energy_kwh is None else f"{row.energy_kwh:.3f}", weight=600, right=True
        ),
        Column("COST", lambda row: "" if row.cost is None else f"{row.cost:.2f}", weight=850, right=True),
    ]
    rows = [*report.rows, report.total] if len(report.rows) > 1 else report.rows
    return render_table(session.console, columns, rows)


def _key(report: UsageReport, name: str, row: UsageRow) -> str:
    if row is report.total:
        return "total" if name == report.by[0] else ""
    return row.keys[name] or "-"


def _other(row: UsageRow) -> float:
    return sum(row.phases.get(phase, 0.0) for phase in PHASES if phase not in ("productive", "lost", "uncommitted"))


def _hours(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.4f}"


def _write_csv(session: Session, report: UsageReport) -> None:
    writer = csv_module.writer(session.console.out, lineterminator="\n")
    head = ["jobs", "gpu_hours", *PHASES, "waiting_gpu_hours", "energy_kwh", "cost"]
    writer.writerow([*report.by, *head])
    for row in report.rows:
        figures = [row.gpu_hours, *(row.phases.get(phase, 0.0) for phase in PHASES), row.waiting_gpu_hours]
        ends = ["" if value is None else value for value in (row.energy_kwh, row.cost)]
        writer.writerow([*(spreadsheet(row.keys[name]) for name in report.by), row.jobs, *figures, *ends])


def usage(
    *,
    by: Annotated[
        str, typer.Option("--by", metavar="WHAT", help="user, queue, label:KEY, or several: user,queue.")
    ] = "user",
    since: Annotated[
        str,
        typer.Option(
            "--since", metavar="TIME", help="Use from this time on: 30d, or 2026-11-01; `all` for everything."
        ),
    ] = "7d",
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Use up to this time, as with --since; default: now.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--price", metavar="P", min=0.0, callback=finite, help="Price of a GPU hour; default ORCH_GPU_HOUR_PRICE."
        ),
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Write comma-separated values, every phase in a column.")] = False,
    json: Json = False,
) -> int:
    """Show GPU hours by phase, GPU hours waited for, energy and cost, from the daemon's record.

    Jobs that `orch prune` has removed are no longer counted.
    """
    if csv and json:
        raise BadRequestError("--csv and --json are two forms of the answer", hint="leave one out")
    now = time.time()
    first = None if since == "all" else parse_time(since, "--since", now)
    last = None if until is None else parse_time(until, "--until", now)
    names = [name.strip() for name in by.split(",")]
    session = Session()
    report = session.client().usage(by=names, since=first, until=last, price=price)
    if csv:
        _write_csv(session, report)
        return EXIT_OK
    return answer(session, _table(session, report), report.to_json(), as_json=json)
