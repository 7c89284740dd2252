"""`orch bench` and `orch advise`: when more GPUs pay, measured and predicted. Both work without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Json, ended_in_order
from orchestrator.cli.outcome import require
from orchestrator.cli.session import Session

if TYPE_CHECKING:
    from orchestrator.bench.benchmark import Outcome
    from orchestrator.bench.plan import BenchRequest

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
    from orchestrator.bench.errors import BenchError
    from orchestrator.bench.plan import BenchRequest, parse_numbers, parse_size

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
            from orchestrator.cli.commands.runs.benching import run_nccl_sweep, run_training_suite

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
        from orchestrator.cli.session import print_json

        files = [str(path) for path in outcome.files]
        print_json(session, {"model": request.model_name, "files": files, **outcome.documents})
        return
    from orchestrator.cli.render.bench_view import result_lines

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
    from orchestrator.bench.errors import BenchError
    from orchestrator.bench.plan import BenchRequest, parse_numbers

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
            from orchestrator.cli.commands.runs.advising import advise_job

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
    from orchestrator.bench.advisor.thresholds import run_thresholds
    from orchestrator.cli.commands.runs.advising import logs_kept_on_failure
    from orchestrator.cli.render.advice_view import advice_lines, outcome_json, threshold_lines, thresholds_json
    from orchestrator.cli.session import print_json

    with logs_kept_on_failure() as logs:
        if policy == "thresholds":
            parameters, found = run_thresholds(request, environ=session.environ, logs=logs)
            document = thresholds_json(request.model_name, parameters, found)
            lines = threshold_lines(parameters, found)
        else:
            outcome = run_advisor(request, environ=session.environ, logs=logs, note=session.console.note)
            document = outcome_json(request.model_name, outcome)
            lines = advice_lines(session.console, outcome)
    if as_json:
        print_json(session, document)
    else:
        for line in lines:
            session.console.print(line)
    return EXIT_OK
