"""`orch usage`: what users, queues and labels used."""

from __future__ import annotations

import csv as csv_module
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Json, finite
from orchestrator.cli.render.table import Column, render_table
from orchestrator.cli.session import Session, answer
from orchestrator.cli.times import parse_time

if TYPE_CHECKING:
    from orchestrator.api.usage_views import UsageReport, UsageRow


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
