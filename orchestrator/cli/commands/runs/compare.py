"""`orch compare`: compares runs with the first of them, with intervals. Works on files alone, without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_JOB_FAILED, EXIT_OK, BadRequestError
from orchestrator.cli.commands.runs.report import Runs
from orchestrator.cli.commands.shared import Json
from orchestrator.cli.session import Session, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.analysis.comparison.alignment import Align
    from orchestrator.analysis.comparison.comparing import Comparison
    from orchestrator.analysis.reading.series import Run

OVERLAY, HISTOGRAMS, TEXT = "gpu_comparison.png", "gpu_comparison_histograms.png", "comparison.txt"


def compare(
    runs: Runs,
    align: Annotated[
        str, typer.Option("--align", metavar="A", help="step, time, or auto: step where all runs report steps.")
    ] = "auto",
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", metavar="COND", help='Exit code 1 if this holds: "memory>+5%". Repeatable.'),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", metavar="DIR", help="Where the files go; default compare-NAME-NAME.")
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Write pictures and text, or only print.")] = True,
    json: Json = False,
) -> int:
    """Compare jobs or recordings with the first one: means, differences with 95 % intervals, and what they show."""
    from orchestrator.analysis.comparison.comparing import CompareError
    from orchestrator.analysis.comparison.comparing import compare as compared
    from orchestrator.analysis.comparison.conditions import broken, parse_condition
    from orchestrator.analysis.comparison.text import broken_lines, comparison_text, sentence
    from orchestrator.analysis.report.as_json import plain
    from orchestrator.cli.commands.runs.sources import find_runs

    session = Session()
    try:
        conditions = [parse_condition(text) for text in fail_if or ()]
        chosen = _alignment(align)
        found = find_runs(session, runs)
        result = compared(found, chosen)
        failed = broken(result, conditions)
    except CompareError as error:
        raise BadRequestError(str(error)) from error
    text = comparison_text(result)
    files = _write(session, found, result, text, output_dir) if plots else []
    if json:
        answer = plain(result)
        for pair in answer["pairs"]:
            rows = next(one for one in result.pairs if one.letter == pair["letter"]).rows
            for row, compared_row in zip(pair["rows"], rows, strict=True):
                row["sentence"] = sentence(compared_row, pair["letter"])
        broken_conditions = [
            {"condition": one.condition.text, "run": one.letter, "metric": one.row.measure.name} for one in failed
        ]
        print_json(session, {**answer, "failed": broken_conditions, "files": [str(path) for path in files]})
    else:
        session.console.print(text)
        for path in files:
            session.console.print(str(path))
    for line in broken_lines(failed):
        session.console.print_error(line)
    return EXIT_JOB_FAILED if failed else EXIT_OK


def _alignment(name: str) -> Align | None:
    from orchestrator.analysis.comparison.alignment import Align

    if name == "auto":
        return None
    if name not in set(Align):
        raise BadRequestError(f"--align {name[:50]!r} is unknown", hint="one of: auto, step, time")
    return Align(name)


def _write(session: Session, runs: Sequence[Run], result: Comparison, text: str, output_dir: Path | None) -> list[Path]:
    from orchestrator.analysis.plots.comparison import write_histograms, write_overlay
    from orchestrator.analysis.plots.style import PlotError
    from orchestrator.analysis.report.writing import file_name

    directory = output_dir or Path("compare-" + "-".join(file_name(run.name)[:60] for run in runs[:2]))
    files = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / TEXT).write_text(text, encoding="utf-8")
        files.append(directory / TEXT)
        for draw, name in ((write_overlay, OVERLAY), (write_histograms, HISTOGRAMS)):
            try:
                files.append(draw(runs, result.align, directory / name))
            except PlotError as error:
                session.console.note(str(error))
    except OSError as error:
        raise BadRequestError(
            f"{directory} cannot be written: {error.strerror or error}",
            hint="name another place with --output-dir, or --no-plots",
        ) from error
    return files
