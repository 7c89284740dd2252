"""`orch record`: starts the recorder, runs the command or waits, and reports the recording's quality at the end.

A recorded command keeps its terminal, gets the signals sent to orch, and its exit code becomes orch's. Its processes
are assigned to simulated GPUs by their LOCAL_RANK, so that torchrun looks as on hardware.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError, NotFoundError, OrchError
from orchestrator.cli.commands.gpu import Simulate
from orchestrator.cli.commands.shared import Json, takes
from orchestrator.cli.session import Session, print_json
from orchestrator.cli.times import parse_span
from orchestrator.gpu.drivers.inventory import survey
from orchestrator.gpu.drivers.simulated import FILE_NAME, write_assignments
from orchestrator.gpu.recording.recorder import TRAINING_VARIABLE, Recorder, RecordOptions, TrainingFile
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.analysis.runs import Run
    from orchestrator.gpu.drivers.inventory import Survey

SPREAD_SECONDS = 0.5
JOB_POLL_SECONDS = 2.0
SIMULATED = "simulated-"


@dataclass(frozen=True, kw_only=True)
class RecordRequest:
    """The options of `orch record`."""

    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD...]", help="Run this command, and record until it ends.")
    ] = None
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Part of the files' names.")] = "run"
    rate: Annotated[float, typer.Option("--rate", metavar="HZ", help="Readings a second: 1, 10, 100, up to 1000.")] = (
        1.0
    )
    lasts: Annotated[
        str | None, typer.Option("--duration", metavar="D", help="Stop after this long: 30s, 10m, 8h.")
    ] = None
    csv: Annotated[bool, typer.Option("--csv", help="Write gpu_metrics_TIME.csv instead of JSON.")] = False
    columns: Annotated[str, typer.Option("--columns", metavar="A,B", help="With --csv: which values of each GPU.")] = (
        "power_w,temp_c"
    )
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the files go.")] = Path()
    gpu: Annotated[
        int | None,
        typer.Option("--gpu", metavar="N", min=0, help="Which GPU the single-GPU file holds; default the first."),
    ] = None
    stats_file: Annotated[
        str | None, typer.Option("--stats-file", metavar="NAME", help="Name of the single-GPU file: gpu_stats.json.")
    ] = None
    job: Annotated[
        str | None, typer.Option("--job", metavar="JOB", help="Record this job's GPUs on this machine until it ends.")
    ] = None
    simulate: Simulate = 0
    report: Annotated[
        bool, typer.Option("--report", help="Write the summary and the graphs of the recording beside it.")
    ] = False
    compare_with: Annotated[
        Path | None, typer.Option("--compare-with", metavar="FILE", help="Compare with an earlier recording.")
    ] = None
    json: Json = False

    @property
    def seconds(self) -> float | None:
        """The longest duration; None without a limit. Raises BadRequestError."""
        return None if self.lasts is None else parse_span(self.lasts, "the duration")


def run_recording(session: Session, request: RecordRequest, *, poll_seconds: float = JOB_POLL_SECONDS) -> int:
    """Record as requested; return the command's exit code, or 0."""
    if request.job and request.command:
        raise BadRequestError("--job and a command exclude each other", hint="record either a job or a command")
    if request.command and shutil.which(request.command[0]) is None:
        raise BadRequestError(f"{request.command[0]}: no such command", hint="give its path, or check PATH")
    seconds, earlier = request.seconds, _earlier(request.compare_with)
    with tempfile.TemporaryDirectory(prefix="orch-record-") as scratch, _Signals() as signals:
        training_file = TrainingFile(Path(scratch) / "training.json")
        watched = _RecordedCommand(session, request, Path(scratch), seconds, poll_seconds)
        options = RecordOptions(
            directory=request.output,
            name=request.name,
            rate=request.rate,
            csv=request.csv,
            columns=tuple(column.strip() for column in request.columns.split(",") if column.strip()),
            gpu=request.gpu,
            stats_file=request.stats_file,
            training=watched.training if request.job else training_file,
        )
        try:
            recorder = Recorder(watched.gpus.readers, options)
            gc.collect()
            gc.freeze()  # collecting the existing objects repeatedly would delay ticks by milliseconds
            recorder.start()
        except (ValueError, OSError) as error:
            watched.gpus.close()
            raise BadRequestError(f"cannot record: {error}") from error
        for path in recorder.paths:
            session.console.note(
                f"recording {plural(len(watched.gpus.gpus), 'GPU')} at {request.rate:g} Hz into {path}"
            )
        try:
            code = watched.wait(Path(scratch), signals)
        finally:
            recorder.stop()
            gc.unfreeze()
    if recorder.problem:
        session.console.print_error(recorder.problem)
    if request.report:
        _write_report(session, recorder)
    _print_result(session, recorder, as_json=request.json)
    if earlier is not None:
        _compare(session, earlier, recorder)
    return code


def _earlier(path: Path | None) -> Run | None:
    """Return the recording to compare with, read before anything starts."""
    if path is None:
        return None
    from orchestrator.analysis.runs import SourceError, read_run

    try:
        return read_run(path)
    except SourceError as error:
        raise BadRequestError(f"cannot compare: {error}") from error


def _compare(session: Session, earlier: Run, recorder: Recorder) -> None:
    """Print the comparison with an earlier recording; recordings without a common figure do not fail this one."""
    from orchestrator.analysis.comparison import CompareError, compare, comparison_text
    from orchestrator.analysis.runs import SourceError, read_run

    try:
        session.console.print(comparison_text(compare((earlier, read_run(recorder.paths[-1])))))
    except (CompareError, SourceError) as error:
        session.console.print_error(f"cannot compare: {error}")


def _write_report(session: Session, recorder: Recorder) -> None:
    """Write the summary in text, and the graphs; a failed one does not fail the recording."""
    from orchestrator.analysis.plots import PlotError, write_overview
    from orchestrator.analysis.report import summary_text
    from orchestrator.analysis.run_summary import summarize_run
    from orchestrator.analysis.runs import SourceError, read_run

    first = recorder.paths[0]
    try:
        run = read_run(recorder.paths[-1], name=first.stem)
        summary = first.with_name(f"{first.stem}_summary.txt")
        quality = f"Recording\n{'-' * 9}\n{recorder.stats.text()}\n"
        summary.write_text(f"{summary_text(summarize_run(run))}\n{quality}", encoding="utf-8")
        session.console.note(f"wrote {summary}")
        session.console.note(f"wrote {write_overview(run, first.with_name(f'{first.stem}_plot.png'))}")
    except (PlotError, SourceError) as error:
        session.console.print_error(str(error))


def _print_result(session: Session, recorder: Recorder, *, as_json: bool) -> None:
    if as_json:
        paths = [str(path) for path in recorder.paths]
        print_json(session, {"files": paths, **recorder.stats.as_dict(), "problem": recorder.problem})
    else:
        session.console.note(recorder.stats.text())


class _RecordedCommand:
    """Recorded GPUs and the end of the recording: that of a job or a command, a duration, or Ctrl-C."""

    def __init__(
        self, session: Session, request: RecordRequest, scratch: Path, seconds: float | None, poll_seconds: float
    ) -> None:
        self._session = session
        self._request = request
        self._seconds, self._poll_seconds = seconds, poll_seconds
        self._job: Any = None
        self._job_asked = 0.0
        assignments = scratch / FILE_NAME
        self._assignments = assignments
        if request.job:
            self.gpus = self._of_job(request.job)
        else:
            self.gpus = survey(simulate=request.simulate, assignments=assignments)
            for problem in self.gpus.problems:
                session.console.note(problem)

    def _of_job(self, ref: str) -> Survey:
        """Return the GPUs of a job that are on this machine."""
        self._job = self._session.client().job(ref)
        wanted = {uuid for rank in self._job.gpus for uuid in rank.gpu_uuids}
        found = _survey_for(wanted, self._assignments)
        self._assign()
        mine = tuple(reader for reader in found.readers if reader.info.uuid in wanted)
        for reader in found.readers:
            if reader not in mine:
                reader.close()
        if not mine:
            raise NotFoundError(
                f"none of the GPUs of {self._job.id} is on this machine",
                hint="run `orch record --job` on the job's node; `orch status JOB` names it",
            )
        return type(found)(readers=mine, problems=found.problems)

    def training(self) -> Mapping[str, Any]:
        """Return epoch, step and phase that the job reported last."""
        progress = self._job.progress
        if progress is None:
            return {}
        fields = {"epoch": progress.epoch, "batch": progress.step, "phase": progress.phase}
        return {key: value for key, value in fields.items() if value is not None}

    def wait(self, scratch: Path, signals: _Signals) -> int:
        """Wait until the recording must end; return the exit code."""
        if self._request.command:
            return _run(self._request, self._request.command, self._seconds, scratch, signals)
        until = float("inf") if self._seconds is None else time.monotonic() + self._seconds
        while not signals.received and (left := until - time.monotonic()) > 0:
            if self._job is not None and self._job_over():
                break
            time.sleep(min(0.1, left))
        return EXIT_OK

    def _job_over(self) -> bool:
        """Return whether the job has ended; polled rarely. An unreachable daemon does not end a recording."""
        if time.monotonic() - self._job_asked < self._poll_seconds:
            return False
        self._job_asked = time.monotonic()
        with contextlib.suppress(OrchError):
            self._job = self._session.client().job(self._job.id)
            self._assign()
        return bool(self._job.is_terminal)

    def _assign(self) -> None:
        """Assign the job's processes to its simulated GPUs, if it has some."""
        pids: dict[int, list[int]] = {}
        for rank in self._job.gpus:
            for uuid in rank.gpu_uuids:
                if uuid.startswith(SIMULATED) and rank.pid is not None:
                    pids.setdefault(int(uuid.rpartition("-")[2]), []).append(rank.pid)
        if pids:
            write_assignments(self._assignments, pids)


def _survey_for(uuids: set[str], assignments: Path) -> Survey:
    """Return the GPUs of this machine; simulated ones if the UUIDs are of simulated GPUs."""
    simulated = [uuid.removeprefix(SIMULATED).rpartition("-") for uuid in uuids if uuid.startswith(SIMULATED)]
    if not simulated:
        return survey()
    count = 1 + max(int(index) for _, _, index in simulated)
    return survey(simulate=count, node=simulated[0][0], assignments=assignments)


class _Signals:
    """Collects SIGINT and SIGTERM, so that a recording ends in order; passes SIGTERM on to a running command."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.command: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.received.append(number)
        # Ctrl-C reaches a command from the terminal itself; only signals sent to orch alone are passed on.
        if number == signal.SIGTERM and self.command is not None:
            self.command.send_signal(number)


def _run(
    request: RecordRequest, command: Sequence[str], seconds: float | None, scratch: Path, signals: _Signals
) -> int:
    """Run the command to its end; return the exit code that a shell would."""
    environ = {**os.environ, TRAINING_VARIABLE: str(scratch / "training.json")}
    try:
        process = signals.command = subprocess.Popen(command, env=environ)
    except OSError as error:
        raise BadRequestError(f"{command[0]} cannot be run: {error.strerror}", hint="try it by hand") from error
    if signal.SIGTERM in signals.received:
        process.terminate()  # the signal arrived just before the command started
    done = threading.Event()
    spreader = threading.Thread(target=_spread, args=(process.pid, request, scratch, done), daemon=True)
    if request.simulate:
        spreader.start()
    try:
        code = _wait(process, seconds)
    finally:
        done.set()
        if request.simulate:
            spreader.join()
    return 128 - code if code < 0 else code


def _wait(process: subprocess.Popen[bytes], seconds: float | None) -> int:
    """Wait for the command; after ``seconds`` it gets SIGTERM, and SIGKILL ten seconds later."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        return process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _spread(pid: int, request: RecordRequest, scratch: Path, done: threading.Event) -> None:
    """Keep the assignment of the command's processes to simulated GPUs up to date until it ends."""
    while not done.is_set():
        write_assignments(scratch / FILE_NAME, ranks_below(pid, request.simulate))
        done.wait(SPREAD_SECONDS)


def ranks_below(pid: int, gpus: int) -> Mapping[int, Sequence[int]]:
    """Return process ids by simulated GPU: those with a LOCAL_RANK by it, else the command itself on the first GPU."""
    import psutil

    found: dict[int, list[int]] = {}
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error, ValueError):
                rank = process.environ().get("LOCAL_RANK")
                if rank is not None:
                    found.setdefault(int(rank) % gpus, []).append(process.pid)
    return found or {0: [pid]}


CONTEXT_SETTINGS = {"record": {"allow_interspersed_args": False}}


@takes(RecordRequest)
def record(request: RecordRequest) -> int:
    """Record GPUs into a file: orch record --rate 100 --csv -- python train.py. Ctrl-C ends it."""
    return run_recording(Session(), request)
