"""Table of jobs: one line each, or a few short ones on a narrow terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.cli.console import clean, clip
from orchestrator.cli.render.gpu_view import poor_balance
from orchestrator.cli.render.table import Cell, Column, bar, render_table
from orchestrator.units import age, duration, number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.api.views import JobView
    from orchestrator.cli.console import Console

BAR_WIDTH = 10
NARROW = 72
STATE_STYLES = {
    "PENDING": ("yellow",),
    "STARTING": ("cyan",),
    "RUNNING": ("green",),
    "RECOVERING": ("magenta",),
    "DRAINING": ("magenta",),
    "SUSPENDED": ("yellow",),
    "SUCCEEDED": ("green", "bold"),
    "FAILED": ("red", "bold"),
    "CANCELLED": ("dim",),
}
MOVING = frozenset({"STARTING", "RUNNING", "RECOVERING", "DRAINING"})

COLUMNS = (
    Column("JOB", weight=1000, shrink=False),
    Column("STATE", weight=900),
    Column("PROGRESS", weight=800),
    Column("RESTARTS", weight=500, right=True),
    Column("GPUS", weight=400, right=True),
    Column("AGE", weight=600, right=True),
    Column("USER", weight=300),
    Column("REASON", weight=700, shrink=True, least=16),
)


def job_lines(
    console: Console, jobs: Sequence[JobView], now: float, places: Mapping[str, str] | None = None
) -> list[str]:
    """Return a table of jobs, those of a matrix in one line; USER if there are several. ``places``: in the queue, by id."""
    places = places or {}
    several = len({job.user for job in jobs}) > 1
    rows: list[list[Cell]] = []
    lines: list[str] = []
    for group in _grouped(jobs):
        if console.width >= NARROW:
            if len(group) == 1:
                rows.append(_row(console, group[0], now, _remark(group[0], places), with_user=several))
            else:
                rows.append(_unit_row(group, now, with_user=several))
        elif len(group) == 1:
            lines += _stacked(console, group[0], now, _remark(group[0], places))
        else:
            lines += _stacked_unit(console, group, now)
    return lines or render_table(console, COLUMNS, rows)


def _grouped(jobs: Sequence[JobView]) -> list[list[JobView]]:
    """Group the jobs of one matrix, at the place of the first of them."""
    groups: dict[str, list[JobView]] = {}
    for place, job in enumerate(jobs):
        groups.setdefault(str(place) if job.matrix is None else job.matrix.id, []).append(job)
    return list(groups.values())


def _unit(jobs: Sequence[JobView]) -> tuple[str, str, str]:
    """Return a matrix's id, the number of its jobs shown, and their states."""
    cell = jobs[0].matrix
    assert cell is not None
    counts = {state: sum(job.state == state for job in jobs) for state in STATE_STYLES}
    states = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    return cell.id, f"{len(jobs)} jobs", states


def _unit_row(jobs: Sequence[JobView], now: float, *, with_user: bool) -> list[Cell]:
    name, size, states = _unit(jobs)
    restarts = sum(job.restarts for job in jobs)
    gpus = sum(job.gpu_count for job in jobs if job.state in MOVING)
    return [
        Cell(name, ("bold",)),
        Cell("matrix", ("dim",)),
        Cell(size),
        Cell(str(restarts) if restarts else "", ("yellow",)),
        Cell(number(gpus) if gpus else ""),
        Cell(age(now - min(job.submitted_at for job in jobs))),
        Cell(clean(jobs[0].user) if with_user else ""),
        Cell(states, ("dim",)),
    ]


def _stacked_unit(console: Console, jobs: Sequence[JobView], now: float) -> list[str]:
    name, size, states = _unit(jobs)
    facts = f" {console.glyphs.dot} ".join([size, states, age(now - min(job.submitted_at for job in jobs))])
    shown = clip(name, console.width - len("matrix") - 2, console.glyphs.ellipsis)
    return [
        f"{console.style(shown, 'bold')}  {console.style('matrix', 'dim')}",
        "  " + clip(facts, console.width - 2, console.glyphs.ellipsis),
    ]


def _row(console: Console, job: JobView, now: float, remark: Cell, *, with_user: bool) -> list[Cell]:
    return [
        Cell(job.id, ("bold",)),
        Cell(state_text(job), STATE_STYLES.get(job.state, ())),
        Cell(progress_text(console, job)),
        Cell(str(job.restarts) if job.restarts else "", ("yellow",)),
        Cell(gpus_text(job)),
        Cell(age(now - job.submitted_at)),
        Cell(clean(job.user) if with_user else ""),
        remark,
    ]


def _stacked(console: Console, job: JobView, now: float, remark: Cell) -> list[str]:
    dot = f" {console.glyphs.dot} "
    facts = [progress_text(console, job)]
    if gpus := gpus_text(job):
        facts.append(f"{gpus} GPU" + ("" if gpus == "1" else "s"))
    if job.restarts:
        facts.append(f"{job.restarts} restart" + ("" if job.restarts == 1 else "s"))
    facts.append(age(now - job.submitted_at))
    state = state_text(job)
    name = clip(job.id, console.width - len(state) - 2, console.glyphs.ellipsis)
    lines = [f"{console.style(name, 'bold')}  {console.style(state, *STATE_STYLES.get(job.state, ()))}"]
    lines.append("  " + clip(dot.join(fact for fact in facts if fact), console.width - 2, console.glyphs.ellipsis))
    if remark.text:
        lines.append(
            "  " + console.style(clip(remark.text, console.width - 2, console.glyphs.ellipsis), *remark.styles)
        )
    return lines


def _remark(job: JobView, places: Mapping[str, str]) -> Cell:
    """Return the first finding, the stall, or a poor balance; else a waiting job's place, and the state's reason."""
    if job.findings:
        more = f" (and {len(job.findings) - 1} more)" if len(job.findings) > 1 else ""
        first = job.findings[0]
        return Cell(clean(first.sentence) + more, ("red" if first.severity == "critical" else "yellow",))
    if job.stall:
        return Cell(clean(job.stall), ("yellow",))
    poor = poor_balance(job.balance) if job.state == "RUNNING" else ""
    if poor:
        return Cell(clean(poor), ("yellow",))
    place = places.get(job.id, "") if job.state == "PENDING" else ""
    return Cell(": ".join(part for part in (place, clean(job.reason)) if part), ("dim",))


def state_text(job: JobView) -> str:
    """Return the state, marked if the job runs with a part unreachable."""
    return f"{job.state} (degraded)" if job.degraded else job.state


def progress_text(console: Console, job: JobView) -> str:
    """Return a bar with the share done and the time left, else step and phase; empty if no progress was reported."""
    progress = job.progress
    if progress is None:
        return ""
    if progress.fraction is None:
        parts = [f"step {progress.step}" if progress.step is not None else "", clean(progress.phase or "")]
        return " ".join(part for part in parts if part)
    text = f"{bar(progress.fraction, BAR_WIDTH, console.glyphs)} {int(100 * min(progress.fraction, 1.0)):3d}%"
    if progress.eta_seconds is not None and job.state in MOVING:
        text += f" {duration(max(1.0, progress.eta_seconds))} left"
    return text


def gpus_text(job: JobView) -> str:
    """Return the number of GPUs; empty for none."""
    return number(job.gpu_count) if job.gpu_count else ""
