"""`orch matrix`: the jobs of a matrix, its results, and the list of all."""

from __future__ import annotations

from functools import partial
from pathlib import Path  # noqa: TC003  # typer reads the annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError, OrchError
from orchestrator.cli.commands.shared import Json, complete_job
from orchestrator.cli.console import clean
from orchestrator.cli.render.jobs import BAR_WIDTH, STATE_STYLES
from orchestrator.cli.render.table import Cell, Column, bar, render_table
from orchestrator.cli.session import Session, answer, writing
from orchestrator.cli.times import value_text
from orchestrator.units import duration, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.analysis.matrices import MatrixRun, SearchResult
    from orchestrator.api.matrix_views import MatrixCellView, MatrixJobView, MatrixView
    from orchestrator.api.views import JobView
    from orchestrator.cli.console import Console


PRUNED = "PRUNED"
BEST = ("green", "bold")
_ORDER = (*STATE_STYLES, PRUNED)
LISTED: tuple[Column[dict[str, Any]], ...] = (
    Column("MATRIX", lambda row: row["id"], weight=1000, styles=("bold",)),
    Column("JOBS", lambda row: row["count"], weight=900, right=True),
    Column("STATES", lambda row: counts_text(row["counts"]), weight=800, shrink=True),
    Column("USER", lambda row: row["user"], weight=300),
)


def listed(cell: MatrixCellView, jobs: Sequence[JobView]) -> dict[str, Any]:
    """Return one matrix of the list, whose jobs are newest first."""
    counts = newest_states(jobs)
    return {"id": cell.id, "name": cell.name, "user": jobs[0].user, "count": cell.count, "counts": counts}


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
    return lines + render_table(console, _columns(console, view), view.jobs)


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


def _columns(console: Console, view: MatrixView) -> list[Column[MatrixJobView]]:
    values: list[Column[MatrixJobView]] = [
        Column(name.upper(), partial(_value, name), weight=850) for name in view.parameters
    ]
    progress: Column[MatrixJobView] = Column("PROGRESS", partial(_progress, console), weight=700)
    job_id: Column[MatrixJobView] = Column("JOB", lambda job: job.job_id, weight=950)
    if view.objectives:
        return [
            Column("TRIAL", lambda job: job.index, weight=600, right=True),
            *values,
            Column("STATE", lambda job: Cell(shown_state(job), ("dim",) if job.pruned else _style(job)), weight=900),
            *(Column(name.upper(), partial(_given, name), weight=800, right=True) for name in view.objectives),
            progress,
            job_id,
            Column("REASON", lambda job: job.missing or job.reason, weight=300, shrink=True, styles=("dim",)),
        ]
    score = (view.score_attribute or "score").upper()
    best = [found.best for found in view.jobs if found.best is not None]
    top = (max if view.score_order == "max" else min)(best, default=None)

    def best_cell(job: MatrixJobView) -> Cell:
        return Cell(number(job.best, 5), BEST if job.best is not None and job.best == top else ())

    return [
        *values,
        Column("STATE", lambda job: Cell(job.state, _style(job)), weight=900),
        Column(f"BEST {score}", best_cell, weight=800, right=True),
        Column(f"LAST {score}", lambda job: number(job.last, 5), weight=500, right=True),
        progress,
        Column("RUNS", lambda job: job.runs if job.runs > 1 else "", weight=400, right=True),
        job_id,
        Column("REASON", lambda job: job.reason, weight=300, shrink=True, styles=("dim",)),
    ]


def _style(job: MatrixJobView) -> tuple[str, ...]:
    return STATE_STYLES.get(job.state, ())


def _value(parameter: str, job: MatrixJobView) -> str:
    return value_text(job.values.get(parameter))


def _given(objective: str, job: MatrixJobView) -> Cell:
    return Cell(number(job.given.get(objective), 5), BEST if job.is_best else ())


def _progress(console: Console, job: MatrixJobView) -> str:
    if job.fraction is None:
        return ""
    text = f"{bar(job.fraction, BAR_WIDTH, console.glyphs)} {int(100 * min(job.fraction, 1.0)):3d}%"
    if job.eta_seconds is not None and job.ended_at is None:
        text += f" {duration(max(1.0, job.eta_seconds))} left"
    return text


Name = Annotated[
    str | None,
    typer.Argument(
        metavar="MATRIX",
        help="Its id, the beginning of one, or its name; default: list all.",
        autocompletion=complete_job,
    ),
]


def show_matrix(session: Session, ref: str, *, watch: bool, as_json: bool) -> int:
    """Print the matrix now, or until it has ended."""
    client = session.client()
    found = client.matrix(ref)
    if watch:
        from orchestrator.cli.commands.logs import watch_view

        watch_view(
            session,
            lambda: client.matrix(found.id),
            lambda view: matrix_lines(session.console, view),
            job_ids=() if found.searching else tuple(job.job_id for job in found.jobs),
            ended=lambda view: view.is_terminal,
            as_json=(lambda view: view.to_json()) if as_json else None,
        )
        return EXIT_OK
    return answer(session, matrix_lines(session.console, found), found.to_json(), as_json=as_json)


def matrix(
    name: Name = None,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep running and print changes, until it ends.")
    ] = False,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            metavar="DIR",
            help="Write telemetry, a summary by configuration, graphs, and report.html with all of it.",
        ),
    ] = None,
    repeats: Annotated[
        list[str] | None,
        typer.Option(
            "--repeats", metavar="PARAMETER", help="A parameter that repeats runs of one configuration, as `seed` does."
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Show the jobs of a matrix: state, best value (checkpoint.score_attribute), time left; of a search, its trials and the best.

    With --results DIR: the runs by configuration, over all runs of each, with their spread.
    """
    session = Session()
    if name is None:
        if results is not None or watch:
            raise BadRequestError("no matrix was named", hint="`orch matrix` lists them")
        return _list(session, as_json=json)
    if results is None:
        if repeats:
            raise BadRequestError("--repeats says how results are put together", hint="add --results DIR")
        return show_matrix(session, name, watch=watch, as_json=json)
    if watch:
        raise BadRequestError("--watch shows no results", hint="leave it out, or leave out --results")
    return _write(session, session.client().matrix(name), results, repeats or (), as_json=json)


def _list(session: Session, *, as_json: bool) -> int:
    """Print every matrix that has a job in the store, the newest first."""
    groups: dict[str, tuple[MatrixCellView, list[JobView]]] = {}
    for job in session.client().jobs().jobs:
        if job.matrix is not None:
            groups.setdefault(job.matrix.id, (job.matrix, []))[1].append(job)
    rows = [listed(*group) for group in groups.values()]
    none = ["no matrices; `matrix:` in a job.yaml makes one job for each combination"]
    return answer(session, render_table(session.console, LISTED, rows) or none, rows, as_json=as_json)


def _write(
    session: Session, view: MatrixView, directory: Path, repeats: list[str] | tuple[()], *, as_json: bool
) -> int:
    from orchestrator.analysis.matrices import REPEATS, Score, summary_text, write_results

    unknown = [name for name in repeats if name not in view.parameters]
    if unknown:
        raise BadRequestError(
            f"--repeats {unknown[0]} is not a parameter of {view.id}", hint=f"one of {', '.join(view.parameters)}"
        )
    score = None
    if view.score_attribute is not None:
        score = Score(name=view.score_attribute, highest=view.score_order == "max")
    with writing(directory, "name another place with --results"):
        runs, kept = _runs(session, view), REPEATS | frozenset(repeats)
        written = write_results(runs, directory, score, repeats=kept, search=_search(view), title=view.id)
    lines = [summary_text(written.configurations).rstrip(), str(directory)]
    return answer(session, lines, written.to_json(), as_json=as_json, notes=written.missing)


def _search(view: MatrixView) -> SearchResult | None:
    """Return the trials of a search; None for a grid."""
    from orchestrator.analysis.matrices import SearchResult, TrialResult

    if not view.objectives:
        return None
    trials = [
        TrialResult(
            number=job.index,
            job_id=job.job_id,
            state=job.state,
            values=job.values,
            given=job.given,
            pruned=job.pruned,
            is_best=job.is_best,
        )
        for job in view.jobs
    ]
    return SearchResult(objectives=view.objectives, trials=trials)


def _runs(session: Session, view: MatrixView) -> list[MatrixRun]:
    """Return every job of the matrix, reruns included, with its recorded run."""
    from orchestrator.analysis.matrices import MatrixRun
    from orchestrator.cli.commands.runs import find_run

    found = []
    for job in sorted(session.client().jobs(since=view.submitted_at - 1.0).jobs, key=lambda job: job.submitted_at):
        if job.matrix is None or job.matrix.id != view.id:
            continue
        try:
            run = find_run(session, job.id)
        except OrchError:
            run = None
        found.append(MatrixRun(job_id=job.id, state=job.state, values=job.matrix.values, run=run))
    return found
