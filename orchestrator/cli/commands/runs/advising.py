"""`orch advise job.yaml`: reads the job file as a submission would, and lets the advisor run its script."""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import trees
from orchestrator.api.errors import EXIT_OK, BadRequestError, invalid_spec
from orchestrator.cli.submitting import job_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.bench.advisor.script_advice import ScriptAdvice
    from orchestrator.bench.advisor.script_probe import Script
    from orchestrator.cli.session import Session
    from orchestrator.spec.job import JobSpec


MOST_ADVISED = 64
"""Most ranks that the advisor tries."""


def advise_job(
    session: Session, file: Path, *, ranks: Sequence[int], precision: str, threads: int, as_json: bool
) -> int:
    """Advise for the job's script and print the answer. Raises BenchError, BadRequestError and InvalidSpecError."""
    from orchestrator.bench.advisor.script_advice import run_script_advisor, script_json
    from orchestrator.cli.render.advice_view import script_lines
    from orchestrator.cli.session import print_json

    script = script_of(_before_advice(file), file, session.environ)
    with logs_kept_on_failure() as logs:
        found = run_script_advisor(
            script, ranks=ranks, threads=threads, precision=precision, logs=logs, note=session.console.note
        )
    if as_json:
        print_json(session, script_json(found))
    else:
        for line in script_lines(session.console, found):
            session.console.print(line)
    return EXIT_OK


@contextmanager
def logs_kept_on_failure() -> Iterator[Path]:
    """Yield a directory for the ranks' output; keep it after a BenchError that names it, if a rank printed anything."""
    from orchestrator.bench.errors import BenchError

    logs = Path(tempfile.mkdtemp(prefix="orch-advise-"))
    try:
        yield logs
    except BenchError as error:
        if str(logs) not in error.hint or not any(log.stat().st_size for log in logs.iterdir()):
            trees.remove(logs)
        raise
    except BaseException:
        trees.remove(logs)
        raise
    trees.remove(logs)


def advice_overrides(session: Session, files: Sequence[str], overrides: Sequence[str]) -> tuple[str, ...]:
    """Run the advisor for a job with num_workers: auto, and return its answer as `--set` overrides of the job.

    Raises BadRequestError for a job that it cannot advise, BenchError if the script cannot be timed.
    """
    from orchestrator.bench.advisor.script_advice import run_script_advisor, script_sentence

    if len(files) != 1 or files[0] == "-":
        raise BadRequestError("--advise runs the script of one job file", hint="name one file")
    file = Path(files[0])
    spec = _before_advice(file, overrides)
    if spec.resources.num_workers != "auto":
        raise BadRequestError(
            "--advise chooses the number of ranks, and the job says it itself in resources.num_workers",
            hint="write num_workers: auto, or leave out --advise",
        )
    auto = spec.resources.auto
    assert auto is not None
    wanted = sorted({n for n in (auto.min, 1, 2, 4, 8, auto.max) if auto.min <= n <= min(auto.max, MOST_ADVISED)})
    if not wanted:
        raise BadRequestError(
            f"resources.auto.min is {auto.min}, and the advisor tries at most {MOST_ADVISED} ranks",
            hint="write a number of ranks",
        )
    with logs_kept_on_failure() as logs:
        found = run_script_advisor(
            script_of(spec, file, session.environ),
            ranks=wanted,
            threads=1,
            precision="fp32",
            logs=logs,
            note=session.console.note,
        )
    if spec.resources.resources_per_worker.gpu and found.device == "cpu":
        raise BadRequestError(
            "the job asks for GPUs, and its script computed on processors here: the advice would apply to processors",
            hint="submit it from a machine with such GPUs, or give a number: --set resources.auto.advice.ranks=4",
        )
    session.console.note(f"advice: {script_sentence(found)}")
    return (f"resources.auto.advice={advice_value(found)}",)


def advice_value(found: ScriptAdvice) -> str:
    """Return the advice as a value of `resources.auto.advice`."""
    shown = found.shown
    pairs = {
        "ranks": str(found.choice.cell.ranks),
        "certain": str(found.certain).lower(),
        "compared_ranks": str(shown.cell.ranks),
        "efficiency": f"{found.efficiency(shown):.4f}",
        "compute_ms": f"{shown.compute * 1e3:.4f}",
        "exposed_ms": f"{shown.exposed * 1e3:.4f}",
        "gradient_bytes": str(found.probe.gradient_bytes),
    }
    return "{" + ", ".join(f"{name}: {value}" for name, value in pairs.items()) + "}"


def _spec(file: Path, overrides: Sequence[str] = ()) -> JobSpec:
    from orchestrator.spec.job import parse_job
    from orchestrator.spec.problems import SpecError

    try:
        return parse_job(job_text(str(file)).text, source=str(file), overrides=overrides)
    except SpecError as error:
        raise invalid_spec(error) from error


def _before_advice(file: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job before it is advised: without GPUs, num_workers: auto is an error until there is advice."""
    workers = _spec(file, (*overrides, "resources.resources_per_worker.gpu=1")).resources.num_workers
    undecided = ("resources.auto.advice={ranks: 1}",) if workers == "auto" else ()
    return _spec(file, (*overrides, *undecided))


def script_of(spec: JobSpec, file: Path, environ: Mapping[str, str]) -> Script:
    """Return the job's script for the advisor. Raises BadRequestError for an entry point that is not a Python script."""
    from orchestrator.bench.advisor.script_probe import Script
    from orchestrator.spec.entrypoint import parse_entrypoint, with_checkpoint

    entry = with_checkpoint(parse_entrypoint(spec.entrypoint), None)
    if entry.kind == "command":
        raise BadRequestError(
            f"the entry point {spec.entrypoint!r} is not a Python script",
            hint="the advisor times the steps of `python FILE` and `python -m NAME`",
        )
    base = file.parent if str(file) != "-" else Path()
    directory = (base / (spec.working_dir or ".")).resolve()
    if not directory.is_dir():
        raise BadRequestError(f"working_dir {directory} is not a directory", hint="create it, or correct working_dir")
    processors = {} if spec.resources.resources_per_worker.gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return Script(
        python=entry.interpreter(shutil.which(entry.python or "python", path=environ.get("PATH")) or sys.executable),
        kind=entry.kind,
        target=entry.target,
        args=entry.args,
        directory=directory,
        environ={**environ, **spec.env, **processors},
    )
