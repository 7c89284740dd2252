"""`orch queue`: the order of waiting jobs, and the shares of queues and users."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Json
from orchestrator.cli.console import clean
from orchestrator.cli.render.jobs import gpus_text
from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.cli.session import Session, print_json
from orchestrator.units import age, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.queue_views import QueueShares, QueueView, UserShareView
    from orchestrator.api.views import JobView


JOBS = (
    Column("JOB", weight=1000),
    Column("QUEUE", weight=500),
    Column("USER", weight=300),
    Column("PRIORITY", weight=800, right=True),
    Column("GPUS", weight=400, right=True),
    Column("WAITS", weight=600, right=True),
    Column("STARTS", weight=650, right=True),
    Column("REASON", weight=700, shrink=True),
)
QUEUES = (
    Column("QUEUE", weight=1000),
    Column("GPUS", weight=900, right=True),
    Column("FAIR SHARE", weight=800, right=True),
    Column("GUARANTEED", weight=700, right=True),
    Column("MAXIMUM", weight=700, right=True),
    Column("WEIGHT", weight=500, right=True),
    Column("SHARE", weight=400, right=True),
    Column("RUNNING", weight=300, right=True),
    Column("WAITING", weight=600, right=True),
)
USERS = (
    Column("USER", weight=1000),
    Column("QUEUE", weight=500),
    Column("GPUS", weight=900, right=True),
    Column("SHARE", weight=800, right=True),
    Column("RUNNING", weight=300, right=True),
    Column("WAITING", weight=600, right=True),
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
    now, starts = time.time(), client.outlook().starts if jobs else {}
    _print(session, JOBS, [_job_row(job, now, starts.get(job.id), users=len(shares.users) > 1) for job in jobs])
    if shares.queues:
        session.console.print("")
        _print(session, QUEUES, [_queue_row(queue, shares) for queue in shares.queues])
    if len(shares.users) > 1:
        session.console.print("")
        _print(session, USERS, [_user_row(user) for user in shares.users])
    return EXIT_OK


def in_order(shares: QueueShares, jobs: Sequence[JobView]) -> list[JobView]:
    """Return the jobs in the scheduler's order; those that wait for other jobs come last, by priority and arrival."""
    places = {job_id: place for place, job_id in enumerate(shares.order)}
    last = len(places)
    return sorted(jobs, key=lambda job: (places.get(job.id, last), -job.priority, job.submitted_at))


def _shares(shares: QueueShares) -> dict[str, object]:
    plain = shares.to_json()
    return {"queues": plain["queues"], "users": plain["users"]}


def _print(session: Session, columns: Sequence[Column], rows: list[list[Cell]]) -> None:
    for line in render_table(session.console, columns, rows):
        session.console.print(line)


def _job_row(job: JobView, now: float, starts_at: float | None, *, users: bool) -> list[Cell]:
    return [
        Cell(job.id, ("bold",)),
        Cell(job.queue),
        Cell(clean(job.user) if users else ""),
        Cell(str(job.priority)),
        Cell(gpus_text(job)),
        Cell(age(now - job.submitted_at)),
        Cell("" if starts_at is None else f"in {age(max(0.0, starts_at - now))}"),
        Cell(clean(job.reason), ("dim",)),
    ]


def _queue_row(queue: QueueView, shares: QueueShares) -> list[Cell]:
    parents = {each.name: each.parent for each in shares.queues}
    depth, parent = 0, queue.parent
    while parent and depth < len(parents):
        depth, parent = depth + 1, parents.get(parent, "")
    return [
        Cell("  " * depth + clean(queue.name), ("bold",)),
        Cell(number(round(queue.gpus, 2))),
        Cell(number(round(queue.fair_share, 2))),
        Cell(str(queue.guaranteed)),
        Cell("-" if queue.maximum is None else str(queue.maximum)),
        Cell(f"{queue.weight:g}"),
        Cell(f"{queue.share:.0%}"),
        Cell(str(queue.running)),
        Cell(str(queue.waiting)),
    ]


def _user_row(user: UserShareView) -> list[Cell]:
    return [
        Cell(clean(user.user), ("bold",)),
        Cell(user.queue),
        Cell(number(round(user.gpus, 2))),
        Cell(f"{user.share:.0%}"),
        Cell(str(user.running)),
        Cell(str(user.waiting)),
    ]


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
    if json:
        print_json(session, view.to_json())
    else:
        session.console.print(_sentence(view))
    return EXIT_OK


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
