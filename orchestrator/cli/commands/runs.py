"""`orch report`, `compare` and `trackio`: finished jobs and recordings, from their files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.analysis.trackers.names import TRACKERS
from orchestrator.api.errors import (
    EXIT_JOB_FAILED,
    EXIT_OK,
    BadRequestError,
    DaemonUnreachableError,
    NotFoundError,
    RefusedError,
)
from orchestrator.cli.commands.shared import Job, Json, complete_job, finite
from orchestrator.cli.session import Session, answer, writing
from orchestrator.parts import install_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.analysis.alignment import Align
    from orchestrator.analysis.comparison import Comparison
    from orchestrator.analysis.runs import Run
    from orchestrator.gpu.recording.reading import Recording


MAX_NAMED = 5


def find_runs(session: Session, refs: Sequence[str]) -> list[Run]:
    """Return the runs that the arguments name, with unique names. Raises OrchError for a missing or unreadable one."""
    runs = [find_run(session, ref) for ref in refs]
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    from dataclasses import replace

    return [replace(run, name=f"{run.name} ({number})") for number, run in enumerate(runs, 1)]


def find_run(session: Session, ref: str) -> Run:
    """Return the run that the argument names: a file or directory that exists, else a job."""
    from orchestrator.analysis.runs import SourceError, read_run

    path = Path(ref)
    try:
        there = path.exists()
    except (OSError, ValueError) as error:
        raise NotFoundError(f"{ref[:100]!r} is neither a file nor a job: {error}") from error
    try:
        return read_run(path if there else job_directory(session, ref))
    except SourceError as error:
        raise BadRequestError(
            str(error), hint="`telemetry: {record: true}` in job.yaml records a job's GPUs"
        ) from error


def job_directory(session: Session, ref: str) -> Path:
    """Return the directory of a job on this machine: from the daemon or, if none runs, in ORCH_HOME."""
    if ref.count("/") > 1 or ref.startswith((".", "/")) or ref.endswith((".json", ".csv", ".jsonl")):
        raise NotFoundError(f"{ref} does not exist", hint="give a recording's file, a job's directory, or a job")
    try:
        job = session.client().job(ref)
    except DaemonUnreachableError:
        return _in_home(session, ref)
    directory = Path(job.log_dir).parent
    if not job.log_dir or not directory.is_dir():
        raise BadRequestError(
            f"the files of {job.id} are not on this machine", hint="run the command on the daemon's machine"
        )
    return directory


def _in_home(session: Session, ref: str) -> Path:
    from orchestrator.api.transport.endpoint import orch_home

    jobs = Path(orch_home(session.environ)) / "jobs"
    found = sorted(path for path in jobs.glob("*") if path.name.startswith(ref)) if jobs.is_dir() else []
    exact = [path for path in found if path.name == ref]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        named = ", ".join(path.name for path in found[:MAX_NAMED])
        raise BadRequestError(
            f"{ref} is the beginning of {len(found)} jobs: {named}", hint="give more letters of the id"
        )
    raise NotFoundError(
        f"there is no file {ref}, and no running daemon has a job {ref}",
        hint="name a file or a directory, or a job of a daemon that runs",
    )


MULTI = "_multi_gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRecording:
    """A recording with at least one sample, and its title."""

    name: str
    recording: Recording


def find_recording(session: Session, ref: str) -> FoundRecording:
    """Read the recording that the argument names. Raises OrchError for a missing or invalid one."""
    path = Path(ref)
    try:
        path = path if path.exists() else job_directory(session, ref)
    except (OSError, ValueError) as error:
        raise NotFoundError(f"{ref[:100]!r} is neither a file nor a job: {error}") from error
    found = _read(path)
    if not found.recording.samples:
        cut = ": its end is cut off, and no sample before it is complete" if found.recording.repaired else ""
        raise BadRequestError(
            f"{found.recording.source} holds no samples{cut}",
            hint="`orch record` makes a recording; `telemetry: {record: true}` in job.yaml records a job's GPUs",
        )
    return found


def _read(path: Path) -> FoundRecording:
    from orchestrator.gpu.recording.job_record import read_job_telemetry
    from orchestrator.gpu.recording.reading import RecordingError, read_recording

    try:
        if path.is_dir():
            job = path.parent if path.name == "telemetry" else path
            return FoundRecording(name=job.name, recording=read_job_telemetry(job / "telemetry"))
        if not path.is_file():
            raise BadRequestError(f"{path} is neither a file nor a directory", hint="give a recording's file")
        everything = path.with_name(f"{path.stem}{MULTI}{path.suffix}")
        chosen = everything if not path.stem.endswith(MULTI) and everything.is_file() else path
        return FoundRecording(name=chosen.name, recording=read_recording(chosen))
    except RecordingError as error:
        raise BadRequestError(str(error), hint="`orch record` makes one") from error
    except OSError as error:
        raise BadRequestError(
            f"{path} cannot be read: {error.strerror or error}", hint="check its path and permissions"
        ) from error


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
    from orchestrator.analysis.report import summary_text, write_report

    session = Session()
    found = find_runs(session, runs)
    directory = output_dir or Path(_directory_name(found))
    with writing(directory, "name another place with --output-dir"):
        written = write_report(found, directory, price_per_kwh=price_per_kwh)
    lines = [summary_text(run) for run in written.runs if len(written.runs) == 1] + [
        str(path) for path in written.files
    ]
    return answer(session, lines, written.to_json(), as_json=json, notes=written.missing)


def _directory_name(runs: list[Run]) -> str:
    """Return report-NAME for one run, report-runs for several."""
    from orchestrator.analysis.report import file_name

    return f"report-{file_name(runs[0].name) if len(runs) == 1 else 'runs'}"


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
    from orchestrator.analysis.comparison import (
        CompareError,
        broken,
        broken_lines,
        comparison_text,
        parse_condition,
        sentence,
    )
    from orchestrator.analysis.comparison import compare as compared
    from orchestrator.analysis.report import plain

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
    value = plain(result)
    for pair, compared_pair in zip(value["pairs"], result.pairs, strict=True):
        for row, compared_row in zip(pair["rows"], compared_pair.rows, strict=True):
            row["sentence"] = sentence(compared_row, pair["letter"])
    value["failed"] = [
        {"condition": one.condition.text, "run": one.letter, "metric": one.row.measure.name} for one in failed
    ]
    value["files"] = [str(path) for path in files]
    answer(session, [text, *value["files"]], value, as_json=json)
    for line in broken_lines(failed):
        session.console.print_error(line)
    return EXIT_JOB_FAILED if failed else EXIT_OK


def _alignment(name: str) -> Align | None:
    from orchestrator.analysis.alignment import Align

    if name == "auto":
        return None
    if name not in set(Align):
        raise BadRequestError(f"--align {name[:50]!r} is unknown", hint="one of: auto, step, time")
    return Align(name)


def _write(session: Session, runs: Sequence[Run], result: Comparison, text: str, output_dir: Path | None) -> list[Path]:
    from orchestrator.analysis.plots import PlotError, write_histograms, write_overlay
    from orchestrator.analysis.report import file_name

    directory = output_dir or Path("compare-" + "-".join(file_name(run.name)[:60] for run in runs[:2]))
    files = [directory / TEXT]
    with writing(directory, "name another place with --output-dir, or --no-plots"):
        directory.mkdir(parents=True, exist_ok=True)
        files[0].write_text(text, encoding="utf-8")
        for draw, name in ((write_overlay, OVERLAY), (write_histograms, HISTOGRAMS)):
            try:
                files.append(draw(runs, result.align, directory / name))
            except PlotError as error:
                session.console.note(str(error))
    return files


def show_trackio(
    job: Job,
    url: Annotated[bool, typer.Option("--url", help="Print the address alone, and open no browser.")] = False,
) -> int:
    """Serve Trackio's dashboard for a job with `trackers: [trackio]` from this machine's files, until Ctrl-C."""
    session = Session()
    view = session.client().job(job)
    found = next((tracker for tracker in view.trackers if tracker.name == "trackio"), None)
    if found is None:
        raise BadRequestError(f"{view.id} is not in Trackio", hint="write trackers: [trackio] in its job.yaml")
    folder, project = found.facts.get("folder", ""), found.facts.get("project", "")
    if not project:
        raise RefusedError(
            f"{view.id} has nothing in Trackio yet" + (f": {found.problem}" if found.problem else ""),
            hint=f"see the trackers of `orch status {view.id}`",
        )
    if TRACKERS["trackio"].missing():
        raise RefusedError("trackio is not installed here", hint=install_line("trackio"))
    os.environ["TRACKIO_DIR"] = folder  # read when trackio is imported
    return _serve(session, project, browser=not url)


def _serve(session: Session, project: str, *, browser: bool) -> int:
    import contextlib
    import io
    import threading
    import webbrowser

    import trackio

    with contextlib.redirect_stdout(io.StringIO()):  # trackio prints the address in a sentence, twice
        server, _, _, address = trackio.show(project, open_browser=False, block_thread=False)
    session.console.print(address)
    session.console.out.flush()
    if browser:
        webbrowser.open(address)
    session.console.note("Ctrl-C ends it")
    try:
        threading.Event().wait()
    finally:
        server.close()
    return EXIT_OK
