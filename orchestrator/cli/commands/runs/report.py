"""`orch report`: shows a run in charts, text and one page. Works on files alone, without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Json, complete_job, finite
from orchestrator.cli.session import Session, print_json

if TYPE_CHECKING:
    from orchestrator.analysis.reading.series import Run

Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB|FILE...",
        help="Jobs, files of `orch record` or gputop, or directories of jobs.",
        autocompletion=complete_job,
    ),
]


def report(
    runs: Runs,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", metavar="DIR", help="Where the files go; default report-NAME.")
    ] = None,
    price_per_kwh: Annotated[
        float | None,
        typer.Option("--price-per-kwh", metavar="P", min=0.0, callback=finite, help="Price of energy, for its cost."),
    ] = None,
    json: Json = False,
) -> int:
    """Write a report of a job or a recording, or of several side by side: pictures, a summary, and one HTML page."""
    from orchestrator.analysis.report.text import summary_text
    from orchestrator.analysis.report.writing import write_report
    from orchestrator.cli.commands.runs.sources import find_runs

    session = Session()
    found = find_runs(session, runs)
    directory = output_dir or Path(_directory_name(found))
    try:
        written = write_report(found, directory, price_per_kwh=price_per_kwh)
    except OSError as error:
        raise BadRequestError(
            f"{directory} cannot be written: {error.strerror or error}", hint="name another place with --output-dir"
        ) from error
    if json:
        print_json(session, written.to_json())
        return EXIT_OK
    if len(written.runs) == 1:
        session.console.print(summary_text(written.runs[0]))
    for path in written.files:
        session.console.print(str(path))
    for problem in written.missing:
        session.console.note(problem)
    return EXIT_OK


def _directory_name(runs: list[Run]) -> str:
    """Return report-NAME for one run, report-runs for several."""
    from orchestrator.analysis.report.writing import file_name

    return f"report-{file_name(runs[0].name) if len(runs) == 1 else 'runs'}"
