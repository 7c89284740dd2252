"""`orch matrix`: the jobs of a matrix as a grid, and its results by configuration."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # typer reads the annotations when it runs
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError, OrchError
from orchestrator.cli.commands.shared import Json, complete_job
from orchestrator.cli.session import Session, print_json

if TYPE_CHECKING:
    from orchestrator.analysis.matrices.search_results import SearchResult
    from orchestrator.analysis.matrices.summary import MatrixRun
    from orchestrator.api.matrix_views import MatrixView
    from orchestrator.api.views import JobView

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="MATRIX",
        help="Its id, the beginning of one, or its name; default: list all.",
        autocompletion=complete_job,
    ),
]


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
    from orchestrator.cli.status_view import show_matrix

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
    from orchestrator.cli.render.matrix_table import list_lines, listed

    groups: dict[str, list[JobView]] = {}
    for job in session.client().jobs().jobs:
        if job.matrix is not None:
            groups.setdefault(job.matrix.id, []).append(job)
    if as_json:
        print_json(session, [listed(matrix_id, jobs) for matrix_id, jobs in groups.items()])
        return EXIT_OK
    for line in list_lines(session.console, groups):
        session.console.print(line)
    return EXIT_OK


def _write(
    session: Session, view: MatrixView, directory: Path, repeats: list[str] | tuple[()], *, as_json: bool
) -> int:
    from orchestrator.analysis.matrices.summary import REPEATS, Score
    from orchestrator.analysis.matrices.writing import summary_text, write_results

    unknown = [name for name in repeats if name not in view.parameters]
    if unknown:
        raise BadRequestError(
            f"--repeats {unknown[0]} is not a parameter of {view.id}", hint=f"one of {', '.join(view.parameters)}"
        )
    score = None
    if view.score_attribute is not None:
        score = Score(name=view.score_attribute, highest=view.score_order == "max")
    try:
        runs, kept = _runs(session, view), REPEATS | frozenset(repeats)
        written = write_results(runs, directory, score, repeats=kept, search=_search(view), title=view.id)
    except OSError as error:
        raise BadRequestError(
            f"{directory} cannot be written: {error.strerror or error}", hint="name another place with --results"
        ) from error
    if as_json:
        print_json(session, written.to_json())
        return EXIT_OK
    session.console.print(summary_text(written.configurations).rstrip())
    session.console.print(str(directory))
    for problem in written.missing:
        session.console.note(problem)
    return EXIT_OK


def _search(view: MatrixView) -> SearchResult | None:
    """Return the trials of a search; None for a grid."""
    from orchestrator.analysis.matrices.search_results import SearchResult
    from orchestrator.analysis.matrices.trials import TrialResult

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
    from orchestrator.analysis.matrices.summary import MatrixRun
    from orchestrator.cli.commands.runs.sources import find_run

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
