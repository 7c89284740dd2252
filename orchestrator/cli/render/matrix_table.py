"""Tables of one matrix, with a row for each combination, and of all matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.cli.console import clean
from orchestrator.cli.render.job_table import BAR_WIDTH, STATE_STYLES
from orchestrator.cli.render.table import Cell, Column, bar, render_table
from orchestrator.cli.times import value_text
from orchestrator.units import duration, number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.api.matrix_views import MatrixJobView, MatrixView
    from orchestrator.api.views import JobView
    from orchestrator.cli.console import Console

PRUNED = "PRUNED"
_ORDER = (*STATE_STYLES, PRUNED)
LISTED = (
    Column("MATRIX", weight=1000, shrink=False),
    Column("JOBS", weight=900, right=True),
    Column("STATES", weight=800, shrink=True),
    Column("USER", weight=300),
)


def list_lines(console: Console, groups: Mapping[str, Sequence[JobView]]) -> list[str]:
    """Return a row for each matrix; ``groups`` are their jobs by the matrix's id, each newest first."""
    rows = [
        [
            Cell(matrix_id, ("bold",)),
            Cell(str(_count(jobs))),
            Cell(counts_text(newest_states(jobs))),
            Cell(clean(jobs[0].user)),
        ]
        for matrix_id, jobs in groups.items()
    ]
    none = ["no matrices; `matrix:` in a job.yaml makes one job for each combination"]
    return render_table(console, LISTED, rows) or none


def _count(jobs: Sequence[JobView]) -> int:
    return jobs[0].matrix.count if jobs[0].matrix is not None else len(jobs)


def listed(matrix_id: str, jobs: Sequence[JobView]) -> dict[str, Any]:
    """Return the row of one matrix for programs."""
    cell = jobs[0].matrix
    return {
        "id": matrix_id,
        "name": cell.name if cell is not None else "",
        "user": jobs[0].user,
        "count": _count(jobs),
        "counts": newest_states(jobs),
    }


def newest_states(jobs: Sequence[JobView]) -> dict[str, int]:
    """Count combinations by the state of their newest job; ``jobs`` are newest first."""
    newest: dict[int, str] = {}
    for job in jobs:
        if job.matrix is not None:
            newest.setdefault(job.matrix.index, PRUNED if job.matrix.pruned else job.state)
    return counted_states(list(newest.values()))


def counted_states(states: Sequence[str]) -> dict[str, int]:
    """Count each state, in the order of a job's life."""
    return {state: states.count(state) for state in _ORDER if state in states}


def counts_text(counts: dict[str, int]) -> str:
    """Return text such as ``2 RUNNING, 10 PENDING``."""
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def matrix_lines(console: Console, view: MatrixView) -> list[str]:
    """Return a head line, and a row for each combination with the values as columns."""
    dot = f" {console.glyphs.dot} "
    facts = [counts_text(counted_states([shown_state(job) for job in view.jobs]))]
    if view.objectives:
        facts.append(f"{len(view.jobs)} of {view.count} trials")
    elif len(view.jobs) < view.count:
        facts.append(f"{view.count - len(view.jobs)} removed")
    if view.max_concurrent is not None:
        facts.append(f"at most {view.max_concurrent} at a time")
    if view.fail_fast:
        facts.append("fail_fast")
    if view.paused:
        facts.append(f"paused: no further trial until `orch resume {view.id}`")
    if view.eta_seconds is not None:
        facts.append(f"about {duration(max(1.0, view.eta_seconds))} left")
    state = console.style(view.state, *STATE_STYLES.get(view.state, ()))
    lines = [f"{console.style(view.id, 'bold')}  {state}{dot}{dot.join(facts)}"]
    if view.problem:
        lines.append(console.style(f"no further trial: {clean(view.problem)}", "red"))
    if view.objectives:
        lines += _best_lines(view)
    return lines + render_table(console, _columns(view), [_row(console, view, job) for job in view.jobs])


def shown_state(job: MatrixJobView) -> str:
    """Return the state as shown: PRUNED for a trial that did worse than the others."""
    return PRUNED if job.pruned else job.state


def _best_lines(view: MatrixView) -> list[str]:
    """Return the best trial in one line; with several objectives, a line for each that no other trial beats."""
    best = [job for job in view.jobs if job.is_best]
    if not best:
        return []
    lines = []
    for job in sorted(best, key=lambda job: next(iter(job.given.values()), 0.0)):
        given = ", ".join(f"{clean(name)} {number(value, 5)}" for name, value in job.given.items())
        values = " ".join(f"{clean(name)}={clean(value_text(value))}" for name, value in job.values.items())
        lines.append(f"  {given}  {values}  {job.job_id}")
    title = "best trial:" if len(view.objectives) == 1 else "best trials (no other trial is better in every objective):"
    return [title, *lines]


def _columns(view: MatrixView) -> list[Column]:
    if view.objectives:
        return [
            Column("TRIAL", weight=600, right=True),
            *(Column(clean(name).upper(), weight=850) for name in view.parameters),
            Column("STATE", weight=900),
            *(Column(clean(name).upper(), weight=800, right=True) for name in view.objectives),
            Column("PROGRESS", weight=700),
            Column("JOB", weight=950),
            Column("REASON", weight=300, shrink=True),
        ]
    values = [Column(clean(name).upper(), weight=850) for name in view.parameters]
    score = clean(view.score_attribute or "score").upper()
    return [
        *values,
        Column("STATE", weight=900),
        Column(f"BEST {score}", weight=800, right=True),
        Column(f"LAST {score}", weight=500, right=True),
        Column("PROGRESS", weight=700),
        Column("RUNS", weight=400, right=True),
        Column("JOB", weight=950),
        Column("REASON", weight=300, shrink=True),
    ]


def _row(console: Console, view: MatrixView, job: MatrixJobView) -> list[Cell]:
    if view.objectives:
        return _trial_row(console, view, job)
    best = [found.best for found in view.jobs if found.best is not None]
    top = (max if view.score_order == "max" else min)(best, default=None)
    return [
        *(Cell(clean(value_text(job.values.get(name)))) for name in view.parameters),
        Cell(job.state, STATE_STYLES.get(job.state, ())),
        Cell(number(job.best, 5), ("green", "bold") if job.best is not None and job.best == top else ()),
        Cell(number(job.last, 5)),
        Cell(_progress(console, job)),
        Cell(str(job.runs) if job.runs > 1 else ""),
        Cell(job.job_id),
        Cell(clean(job.reason), ("dim",)),
    ]


def _trial_row(console: Console, view: MatrixView, job: MatrixJobView) -> list[Cell]:
    state = shown_state(job)
    style = ("green", "bold") if job.is_best else ()
    return [
        Cell(str(job.index)),
        *(Cell(clean(value_text(job.values.get(name)))) for name in view.parameters),
        Cell(state, ("dim",) if job.pruned else STATE_STYLES.get(state, ())),
        *(Cell(number(job.given.get(name), 5), style) for name in view.objectives),
        Cell(_progress(console, job)),
        Cell(job.job_id),
        Cell(clean(job.missing or job.reason), ("dim",)),
    ]


def _progress(console: Console, job: MatrixJobView) -> str:
    if job.fraction is None:
        return ""
    text = f"{bar(job.fraction, BAR_WIDTH, console.glyphs)} {int(100 * min(job.fraction, 1.0)):3d}%"
    if job.eta_seconds is not None and job.ended_at is None:
        text += f" {duration(max(1.0, job.eta_seconds))} left"
    return text
