"""`orch usage`: what users, queues and labels used."""

from __future__ import annotations

import csv
import time
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Json, finite
from orchestrator.cli.console import clean
from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.cli.session import Session, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.usage_views import UsageReport, UsageRow


PHASES = ("productive", "lost", "starting", "recovering", "checkpoint_stall", "draining", "uncommitted")


def show_usage(
    session: Session, by: Sequence[str], since: float | None, until: float | None, price: float | None, form: str
) -> int:
    """Query and print the usage."""
    report = session.client().usage(by=by, since=since, until=until, price=price)
    if form == "json":
        print_json(session, report.to_json())
    elif form == "csv":
        _write_csv(session, report)
    else:
        for line in _table(session, report):
            session.console.print(line)
    return EXIT_OK


def _other(row: UsageRow) -> float:
    return sum(row.phases.get(phase, 0.0) for phase in PHASES if phase not in ("productive", "lost", "uncommitted"))


def _table(session: Session, report: UsageReport) -> list[str]:
    if not report.rows:
        return ["nothing was used in this time"]
    columns = [
        *(Column(clean(name).upper(), weight=1000) for name in report.by),
        Column("JOBS", weight=400, right=True),
        Column("GPU HOURS", weight=900, right=True),
        Column("PRODUCTIVE", weight=800, right=True),
        Column("LOST", weight=800, right=True),
        Column("OVERHEAD", weight=500, right=True),
        Column("OPEN", weight=300, right=True),
        Column("WAITING", weight=700, right=True),
        Column("ENERGY kWh", weight=600, right=True),
        Column("COST", weight=850, right=True),
    ]
    rows = [_row(row, [clean(row.keys[name]) or "-" for name in report.by]) for row in report.rows]
    if len(rows) > 1:
        rows.append(_row(report.total, ["total", *[""] * (len(report.by) - 1)]))
    return render_table(session.console, columns, rows)


def _row(row: UsageRow, keys: Sequence[str]) -> list[Cell]:
    phases = row.phases
    figures = [
        row.gpu_hours,
        phases.get("productive", 0.0),
        phases.get("lost", 0.0),
        _other(row),
        phases.get("uncommitted", 0.0),
        row.waiting_gpu_hours,
    ]
    return [
        *(Cell(key) for key in keys),
        Cell(str(row.jobs)),
        *(Cell(_hours(value)) for value in figures),
        Cell("" if row.energy_kwh is None else f"{row.energy_kwh:.3f}"),
        Cell("" if row.cost is None else f"{row.cost:.2f}"),
    ]


def _hours(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.4f}"


def _write_csv(session: Session, report: UsageReport) -> None:
    writer = csv.writer(session.console.out, lineterminator="\n")
    head = ["jobs", "gpu_hours", *PHASES, "waiting_gpu_hours", "energy_kwh", "cost"]
    writer.writerow([*report.by, *head])
    for row in report.rows:
        figures = [row.gpu_hours, *(row.phases.get(phase, 0.0) for phase in PHASES), row.waiting_gpu_hours]
        ends = ["" if value is None else value for value in (row.energy_kwh, row.cost)]
        writer.writerow([*(_cell(row.keys[name]) for name in report.by), row.jobs, *figures, *ends])


def _cell(text: str) -> str:
    """Return text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


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
    from orchestrator.cli.times import parse_time

    if csv and json:
        raise BadRequestError("--csv and --json are two forms of the answer", hint="leave one out")
    now = time.time()
    first = None if since == "all" else parse_time(since, "--since", now)
    last = None if until is None else parse_time(until, "--until", now)
    names = [name.strip() for name in by.split(",")]
    return show_usage(Session(), names, first, last, price, "json" if json else "csv" if csv else "table")
