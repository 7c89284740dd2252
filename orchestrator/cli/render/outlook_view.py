"""Text of the outlook of a waiting job: its expected start, what it waits for, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.cli.console import clean
from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.units import age, clock, number

if TYPE_CHECKING:
    from orchestrator.api.queue_views import HolderView, OutlookView
    from orchestrator.cli.console import Console

MOST_ROWS: Final = 10
MOST_AHEAD: Final = 5
RULES: Final = {
    "resized": "it is only being resized",
    "overdue": "none of its kind has started for too long (ORCH_AGEING)",
    "queue": "its queue is under its guarantee, or has the smaller share",
    "priority": "it has the higher priority",
    "user": "its user has the smaller share",
    "aged": "it has waited for longer (ORCH_AGEING)",
    "work": "it is expected to need less time, or has run for less",
    "arrival": "it came first",
}
_COLUMNS: Final = (
    Column("JOB", weight=1000),
    Column("USER", weight=300),
    Column("GPUS", weight=900, right=True),
    Column("ENDS", weight=800, right=True),
    Column("KNOWN FROM", weight=500),
)


def outlook_lines(console: Console, outlook: OutlookView, now: float) -> list[str]:
    """Return the lines for one job that waits."""
    lines = ["", f"expected start: {expected(outlook, now)}"]
    if outlook.ahead:
        names = ", ".join(clean(job_id) for job_id in outlook.ahead[:MOST_AHEAD])
        more = ", ..." if len(outlook.ahead) > MOST_AHEAD else ""
        why = f"; {clean(outlook.ahead[-1])} is before it: {RULES.get(outlook.rule, clean(outlook.rule))}"
        lines.append(f"{len(outlook.ahead)} ahead in the queue: {names}{more}{why if outlook.rule else ''}")
    if outlook.holders:
        rows = [_row(holder, now) for holder in outlook.holders[:MOST_ROWS]]
        lines += ["", "jobs that have to end first:", *render_table(console, _COLUMNS, rows)]
        if len(outlook.holders) > MOST_ROWS:
            lines.append(f"and {len(outlook.holders) - MOST_ROWS} more")
    if outlook.stops:
        hours = sum(stop.lost_gpu_seconds or 0.0 for stop in outlook.stops) / 3600
        names = ", ".join(f"{clean(stop.job_id)} ({clean(stop.user)})" for stop in outlook.stops)
        lines.append(f"preemption for it would stop {names}, which repeat at most {number(round(hours, 2))} GPU hours")
    return lines


def expected(outlook: OutlookView, now: float) -> str:
    """Return the expected start of the job as text."""
    if outlook.starts_at is None:
        return "not known" if outlook.holders else "no estimate"
    left = outlook.starts_at - now
    return "now" if left < 1 else f"in about {age(left)}, at {clock(outlook.starts_at, seconds=False)}"


def places(outlook: OutlookView, now: float) -> dict[str, str]:
    """Return the short form by job id: the place in the queue, and the expected start if it is known."""
    return {job_id: _place(at, outlook.starts.get(job_id), now) for at, job_id in enumerate(outlook.order, 1)}


def _place(at: int, starts_at: float | None, now: float) -> str:
    if starts_at is None:
        return f"place {at}"
    left = starts_at - now
    return f"place {at}, starts " + ("now" if left < 1 else f"in about {age(left)}")


def _row(holder: HolderView, now: float) -> list[Cell]:
    return [
        Cell(clean(holder.job_id), ("bold",)),
        Cell(clean(holder.user)),
        Cell(number(round(holder.gpus, 2))),
        Cell("?" if holder.ends_at is None else f"in {age(max(0.0, holder.ends_at - now))}"),
        Cell(_basis(holder)),
    ]


def _basis(holder: HolderView) -> str:
    """Return the basis of the expected end of the job."""
    match holder.basis:
        case "like jobs":
            off = "" if holder.error is None else f", half of such forecasts within {holder.error:.0%}"
            return f"run times of {holder.like_jobs} like jobs{off}"
        case "time so far":
            return "it runs as long again as it has"
        case "":
            return "nothing is known of it"
        case _:
            return clean(holder.basis)
