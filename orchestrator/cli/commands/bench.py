"""`orch bench` and `orch advise`: what several GPUs bring, measured on this machine."""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator import trees
from orchestrator.api.errors import EXIT_OK, BadRequestError, invalid_spec
from orchestrator.cli.commands.shared import Json, ended_in_order, job_text
from orchestrator.cli.render.table import Column, render_table
from orchestrator.cli.session import Session, answer, print_json, require
from orchestrator.units import percent, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from orchestrator.bench.advisor.advisor import AdvisorOutcome
    from orchestrator.bench.advisor.cost_model import Prediction
    from orchestrator.bench.advisor.script_advice import Script, ScriptAdvice, ThresholdAdvice
    from orchestrator.bench.benchmark import Outcome
    from orchestrator.bench.plan import BenchRequest
    from orchestrator.bench.plan import Cell as BenchCell
    from orchestrator.bench.results import CellResult
    from orchestrator.cli.console import Console
    from orchestrator.spec.model import JobSpec


UNKNOWN = "{} ranks: I can't tell: this machine has fewer GPUs, so their links cannot be measured here"


def result_lines(console: Console, results: Sequence[CellResult]) -> list[str]:
    """Return the table's lines, and a line for each configuration that failed."""
    from orchestrator.bench.report import recommendation
    from orchestrator.bench.results import Comparison, compare

    compared = {one.multi.cell: one for one in compare(results)}

    def of(text: Callable[[Comparison], str]) -> Callable[[CellResult], str]:
        return lambda one: text(compared[one.cell]) if one.cell in compared else ""

    columns: tuple[Column[CellResult], ...] = (
        Column("GLOBAL BATCH", lambda one: one.cell.batch, right=True),
        Column("PER RANK", lambda one: one.cell.per_rank, right=True, weight=50),
        Column("RANKS", lambda one: one.cell.ranks, right=True),
        Column("SAMPLES/S", lambda one: f"{one.throughput.value:.0f}", right=True),
        Column("95 %", lambda one: one.throughput.ends(".0f"), weight=60, styles=("dim",)),
        Column("EXPOSED", lambda one: _exposed(one.cell, one.parts.exposed), right=True, weight=40),
        Column("SPEED-UP", of(lambda found: f"{found.speed_up.value:.2f}x"), right=True),
        Column("95 %", of(lambda found: found.speed_up.ends(".2f")), weight=70, styles=("dim",)),
        Column("", of(recommendation), weight=90, shrink=True),
    )
    failed = [
        f"{plural(one.cell.ranks, 'rank')}, global batch {one.cell.batch}: {one.error}" for one in results if one.error
    ]
    return [*render_table(console, columns, [one for one in results if one.runs]), *failed]


def _exposed(cell: BenchCell, seconds: float) -> str:
    """Return the communication that no computation hides; empty for one rank, which has none."""
    return _milliseconds(seconds) if cell.ranks > 1 else ""


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}ms"


def advice_lines(console: Console, outcome: AdvisorOutcome) -> list[str]:
    """Return the advice as lines for people."""
    from orchestrator.bench.advisor.cost_model import Advice, efficiency

    def share(row: tuple[Advice, Prediction]) -> str:
        return percent(efficiency(row[1], row[0].single))

    columns: tuple[Column[tuple[Advice, Prediction]], ...] = (
        Column("GLOBAL BATCH", lambda row: row[0].batch, right=True),
        Column("PER RANK", lambda row: row[1].cell.per_rank, right=True, weight=50),
        Column("RANKS", lambda row: row[1].cell.ranks, right=True),
        Column("PREDICTED SAMPLES/S", lambda row: f"{row[1].throughput.value:.0f}", right=True),
        Column("95 %", lambda row: row[1].throughput.ends(".0f"), weight=70, styles=("dim",)),
        Column("EFFICIENCY", share, right=True, weight=80),
        Column("COMPUTE", lambda row: _milliseconds(row[1].compute), right=True, weight=40),
        Column("EXPOSED", lambda row: _exposed(row[1].cell, row[1].exposed), right=True, weight=60),
    )
    rows = [(advice, one) for advice in outcome.advice for one in advice.predictions]
    return [*render_table(console, columns, rows), *_sentences(outcome)]


def _sentences(outcome: AdvisorOutcome) -> Iterator[str]:
    from orchestrator.bench.advisor.cost_model import MAX_PAYING_BATCH, paying_batch, sentence

    for advice in outcome.advice:
        yield sentence(advice, outcome.probe)
    for ranks in sorted(outcome.calibration.links):
        batch = paying_batch(ranks, outcome.probe, outcome.calibration)
        if batch is None:
            yield f"{ranks} ranks: predicted to pay at no global batch up to {MAX_PAYING_BATCH}"
        else:
            yield f"{ranks} ranks: predicted to pay from a global batch of {batch} on"
    for ranks in outcome.unknown:
        yield UNKNOWN.format(ranks)


def outcome_json(model: str, outcome: AdvisorOutcome) -> dict[str, Any]:
    """Return the advice for programs."""
    from orchestrator.bench.advisor.cost_model import advice_json, paying_batch

    probe, calibration = outcome.probe, outcome.calibration
    return {
        "policy": "measured",
        "model": model,
        "parameters": probe.parameters,
        "device": outcome.device,
        "probe": {"steps": probe.steps, "seconds": probe.seconds, "gradient_bytes": probe.gradient_bytes},
        "links": {
            str(ranks): {"hides": links.hides, "all_reduce_seconds": {str(size): at for size, at in links.points}}
            for ranks, links in calibration.links.items()
        },
        "advice": [advice_json(one, probe) for one in outcome.advice],
        "pays_from_batch_size": {str(n): paying_batch(n, probe, calibration) for n in sorted(calibration.links)},
        "unknown_ranks": list(outcome.unknown),
    }


def threshold_lines(parameters: int, found: Mapping[int, ThresholdAdvice]) -> list[str]:
    """Return the thresholds' advice, a line per batch size."""
    words = {True: "several GPUs", False: "one GPU", None: "I can't tell"}
    head = f"{parameters} trainable parameters; by thresholds alone, nothing was measured"
    return [head, *(f"global batch {batch}: {words[one.several]}: {one.reason}" for batch, one in found.items())]


def thresholds_json(model: str, parameters: int, found: Mapping[int, ThresholdAdvice]) -> dict[str, Any]:
    """Return the thresholds' advice for programs."""
    return {
        "policy": "thresholds",
        "model": model,
        "parameters": parameters,
        "advice": [
            {"batch_size": batch, "multi_gpu": one.several, "reason": one.reason} for batch, one in found.items()
        ],
    }


def script_lines(console: Console, advice: ScriptAdvice) -> list[str]:
    """Return the advice for a job's script as lines for people."""
    from orchestrator.bench.advisor.script_advice import script_sentence

    one = advice.predictions[0].throughput.value
    columns: tuple[Column[Prediction], ...] = (
        Column("RANKS", lambda each: each.cell.ranks, right=True),
        Column("SPEED-UP", lambda each: f"{each.throughput.value / one:.2f}x", right=True),
        Column(
            "95 %",
            lambda each: "-".join(f"{end:.2f}" for end in advice.interval(each) or ()),
            weight=70,
            styles=("dim",),
        ),
        Column("EFFICIENCY", lambda each: percent(advice.efficiency(each)), right=True, weight=80),
        Column("STEP", lambda each: _milliseconds(each.step), right=True, weight=60),
        Column("COMPUTE", lambda each: _milliseconds(each.compute), right=True, weight=40),
        Column("EXPOSED", lambda each: _exposed(each.cell, each.exposed), right=True, weight=60),
    )
    unknown = [UNKNOWN.format(ranks) for ranks in advice.unknown]
    return [*render_table(console, columns, advice.predictions), script_sentence(advice), *unknown]


def run_training_suite(session: Session, request: BenchRequest, name: str, *, sweep: bool, as_json: bool) -> int:
    """Measure the suite and show its claims. Raises BenchError."""
    from orchestrator.bench.plan import BenchError
    from orchestrator.bench.suite import check_suite, claim_lines, run_suite

    if sweep:
        raise BenchError("--suite and --nccl-sweep are two measurements", hint="run one after the other")
    check_suite(name, request)
    outcome = run_suite(request, environ=session.environ, note=session.console.note)
    if as_json:
        print_json(session, {"files": [str(path) for path in outcome.files], **outcome.document})
        return EXIT_OK
    for line in claim_lines(outcome.checked):
        session.console.print(line)
    for path in outcome.files:
        session.console.note(f"wrote {path}")
    return EXIT_OK


def run_nccl_sweep(session: Session, request: BenchRequest, *, as_json: bool) -> int:
    """Try the settings on all GPUs of this machine. Raises BenchError if too few, or none, work with NCCL."""
    from orchestrator.bench.nccl import sweep_json, sweep_lines, sweep_machine

    outcome = sweep_machine(request, environ=session.environ, note=session.console.note)
    return answer(session, sweep_lines(outcome), sweep_json(outcome), as_json=as_json)


MAX_ADVISED = 64
"""Most ranks that the advisor tries."""


def advise_job(
    session: Session, file: Path, *, ranks: Sequence[int], precision: str, threads: int, as_json: bool
) -> int:
    """Advise for the job's script and print the answer. Raises BenchError, BadRequestError and InvalidSpecError."""
    from orchestrator.bench.advisor.script_advice import run_script_advisor, script_json

    script = script_of(_before_advice(file), file, session.environ)
    with logs_kept_on_failure() as logs:
        found = run_script_advisor(
            script, ranks=ranks, threads=threads, precision=precision, logs=logs, note=session.console.note
        )
    return answer(session, script_lines(session.console, found), script_json(found), as_json=as_json)


@contextmanager
def logs_kept_on_failure() -> Iterator[Path]:
    """Yield a directory for the ranks' output; keep it after a BenchError that names it, if a rank printed anything."""
    from orchestrator.bench.plan import BenchError

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
    wanted = sorted({n for n in (auto.min, 1, 2, 4, 8, auto.max) if auto.min <= n <= min(auto.max, MAX_ADVISED)})
    if not wanted:
        raise BadRequestError(
            f"resources.auto.min is {auto.min}, and the advisor tries at most {MAX_ADVISED} ranks",
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
    from orchestrator.bench.advisor.script_advice import Script
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


DEFAULT_BATCH_SIZES = "16,32,64,128"
SUITE_BATCH_SIZE = "32"

Model = Annotated[
    str, typer.Option("--model", metavar="M", help="medium, large, conv, transformer, or FILE.py:factory of your own.")
]
Ranks = Annotated[
    str, typer.Option("--ranks", metavar="N,N", help="Numbers of ranks. As many as there are GPUs; 1,2 on processors.")
]
BatchSizes = Annotated[str, typer.Option("--batch-sizes", metavar="N,N", help="Batch sizes; global by default.")]
Precision = Annotated[str, typer.Option("--precision", metavar="P", help="fp32, bf16 or fp16.")]
Device = Annotated[str, typer.Option("--device", metavar="D", help="cuda, cpu, or auto: GPUs if there are any.")]
Threads = Annotated[int, typer.Option("--threads", metavar="N", help="Threads of each rank.")]


def bench(
    *,
    model: Model = "medium",
    gpu_mode: Annotated[
        str, typer.Option("--gpu-mode", metavar="MODE", help="single, multi, or auto: both, compared.")
    ] = "auto",
    batch_sizes: BatchSizes = DEFAULT_BATCH_SIZES,
    batch_scope: Annotated[
        str,
        typer.Option("--batch-scope", metavar="S", help="Whether batch sizes are global (of all ranks) or per-rank."),
    ] = "global",
    ranks: Ranks = "",
    runs: Annotated[int, typer.Option("--runs", metavar="N", help="Runs of each configuration.")] = 30,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Timed steps of each run.")] = 100,
    precision: Precision = "fp32",
    device: Device = "auto",
    threads: Threads = 1,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", metavar="SIZE", help="Memory of each GPU that may be used: 12GB.")
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", metavar="X", help="Price of a GPU for an hour; adds costs to the report.")
    ] = None,
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", metavar="DIR", help="Where the files go.")] = Path(
        "results"
    ),
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite", metavar="S", help="training: DataParallel, DDP, precision, scaling, against documented claims."
        ),
    ] = None,
    nccl_sweep: Annotated[
        bool, typer.Option("--nccl-sweep", help="Try NCCL settings on all GPUs, report what helps, and set nothing.")
    ] = False,
    json: Json = False,
) -> int:
    """Compare training on one GPU with training on several: throughput, communication, memory, power.

    Writes benchmark_MODEL_single_gpu.json, benchmark_MODEL_multi_gpu.json, comparison_report_MODEL.md, graphs, and a log per
    run. Without GPUs, ranks are processes that compute on processors.
    """
    require("train", "`orch bench`")
    from orchestrator.bench.benchmark import run_benchmark
    from orchestrator.bench.plan import BenchError, BenchRequest, parse_numbers, parse_size

    session = Session()
    if suite is not None and batch_sizes == DEFAULT_BATCH_SIZES:
        batch_sizes = SUITE_BATCH_SIZE
    try:
        request = BenchRequest(
            model=model,
            gpu_mode=gpu_mode,
            batch_sizes=parse_numbers("--batch-sizes", batch_sizes),
            scope=batch_scope,
            ranks=parse_numbers("--ranks", ranks) if ranks else (),
            runs=runs,
            steps=steps,
            precision=precision,
            device=device,
            threads=threads,
            memory_limit_bytes=None if memory_limit is None else parse_size("--memory-limit", memory_limit),
            price_per_gpu_hour=price,
            output=output_dir,
        )
        if suite is not None or nccl_sweep:
            with ended_in_order():
                if suite is None:
                    return run_nccl_sweep(session, request, as_json=json)
                return run_training_suite(session, request, suite, sweep=nccl_sweep, as_json=json)
        with ended_in_order():
            outcome = run_benchmark(request, environ=session.environ, note=session.console.note)
    except BenchError as error:
        raise BadRequestError(error.message, hint=error.hint) from error
    _show(session, request, outcome, as_json=json)
    return EXIT_OK


def _show(session: Session, request: BenchRequest, outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        files = [str(path) for path in outcome.files]
        print_json(session, {"model": request.model_name, "files": files, **outcome.documents})
        return
    for line in result_lines(session.console, outcome.results):
        session.console.print(line)
    for path in outcome.files:
        session.console.note(f"wrote {path}")


def advise(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[JOB.yaml]", help="Advise for this job's own script instead of a model.", show_default=False
        ),
    ] = None,
    *,
    model: Model = "medium",
    ranks: Ranks = "",
    batch_sizes: BatchSizes = DEFAULT_BATCH_SIZES,
    precision: Precision = "fp32",
    device: Device = "auto",
    threads: Threads = 1,
    policy: Annotated[
        str,
        typer.Option("--policy", metavar="P", help="measured, or thresholds: by parameters and batch size alone."),
    ] = "measured",
    json: Json = False,
) -> int:
    """Advise how many GPUs pay off, at which batch size: predicted from at most 20 steps on one rank and the links' speed.

    Batch sizes are global: of all ranks together. `orch bench` measures what this command predicts. With a JOB.yaml its
    script runs unchanged for a few optimizer steps on one rank, in a copy of its directory; each rank keeps the script's own batch.
    """
    require("train", "`orch advise`")
    from orchestrator.bench.plan import BenchError, BenchRequest, parse_numbers

    session = Session()
    if policy not in ("measured", "thresholds"):
        raise BadRequestError(f"--policy {policy} is not known", hint="one of: measured, thresholds")
    try:
        if file is not None:
            if policy != "measured" or model != "medium" or batch_sizes != DEFAULT_BATCH_SIZES or device != "auto":
                raise BadRequestError(
                    f"--model, --batch-sizes, --device and --policy have no effect with {file}",
                    hint="the script has its own model, batch and device; leave them out",
                )
            wanted = parse_numbers("--ranks", ranks) if ranks else (1, 2, 4, 8)
            with ended_in_order():
                return advise_job(session, file, ranks=wanted, precision=precision, threads=threads, as_json=json)
        request = BenchRequest(
            model=model,
            batch_sizes=parse_numbers("--batch-sizes", batch_sizes),
            ranks=parse_numbers("--ranks", ranks) if ranks else (),
            precision=precision,
            device=device,
            threads=threads,
        )
        with ended_in_order():
            return _advise(session, request, policy, as_json=json)
    except BenchError as error:
        raise BadRequestError(error.message, hint=error.hint) from error


def _advise(session: Session, request: BenchRequest, policy: str, *, as_json: bool) -> int:
    from orchestrator.bench.advisor.advisor import run_advisor
    from orchestrator.bench.advisor.script_advice import run_thresholds

    with logs_kept_on_failure() as logs:
        if policy == "thresholds":
            parameters, found = run_thresholds(request, environ=session.environ, logs=logs)
            document = thresholds_json(request.model_name, parameters, found)
            lines = threshold_lines(parameters, found)
        else:
            outcome = run_advisor(request, environ=session.environ, logs=logs, note=session.console.note)
            document = outcome_json(request.model_name, outcome)
            lines = advice_lines(session.console, outcome)
    return answer(session, lines, document, as_json=as_json)
