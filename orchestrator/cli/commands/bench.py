"""`orch bench` and `orch advise`: when more GPUs pay, measured and predicted. Both work without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Json, ended_in_order
from orchestrator.cli.session import Session

if TYPE_CHECKING:
    from orchestrator.bench.benchmark import Outcome
    from orchestrator.bench.plan import BenchRequest

Model = Annotated[
    str, typer.Option("--model", metavar="M", help="medium, large, conv, transformer, or FILE.py:factory of your own.")
]
Ranks = Annotated[
    str, typer.Option("--ranks", metavar="N,N", help="Numbers of ranks. As many as there are GPUs; 1,2 on processors.")
]
BatchSizes = Annotated[str, typer.Option("--batch-sizes", metavar="N,N", help="Batch sizes, global unless said.")]
Precision = Annotated[str, typer.Option("--precision", metavar="P", help="fp32, bf16 or fp16.")]
Device = Annotated[str, typer.Option("--device", metavar="D", help="cuda, cpu, or auto: GPUs where there are some.")]
Threads = Annotated[int, typer.Option("--threads", metavar="N", help="Threads of each rank.")]


def bench(
    *,
    model: Model = "medium",
    gpu_mode: Annotated[
        str, typer.Option("--gpu-mode", metavar="MODE", help="single, multi, or auto: both, compared.")
    ] = "auto",
    batch_sizes: BatchSizes = "16,32,64,128",
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
    json: Json = False,
) -> int:
    """Compare training on one GPU with training on several: throughput, communication, memory, power.

    Writes benchmark_MODEL_single_gpu.json, benchmark_MODEL_multi_gpu.json, comparison_report_MODEL.md, graphs, and a log per
    run. Without GPUs, ranks are processes that compute on processors.
    """
    from orchestrator.bench.benchmark import run_benchmark
    from orchestrator.bench.errors import BenchError
    from orchestrator.bench.plan import BenchRequest, parse_numbers, parse_size

    session = Session()
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
    *,
    model: Model = "medium",
    ranks: Ranks = "",
    batch_sizes: BatchSizes = "16,32,64,128",
    precision: Precision = "fp32",
    device: Device = "auto",
    threads: Threads = 1,
    policy: Annotated[
        str,
        typer.Option("--policy", metavar="P", help="measured, or thresholds: by parameters and batch size alone."),
    ] = "measured",
    json: Json = False,
) -> int:
    """Advise how many GPUs pay, at which batch size: predicted from at most 20 steps on one rank and the links' speed.

    Batch sizes are global: of all ranks together. `orch bench` measures what this command predicts.
    """
    from orchestrator.bench.errors import BenchError
    from orchestrator.bench.plan import BenchRequest, parse_numbers

    session = Session()
    if policy not in ("measured", "thresholds"):
        raise BadRequestError(f"--policy {policy} is not known", hint="one of: measured, thresholds")
    try:
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
    import tempfile

    from orchestrator.bench.advisor.advisor import run_advisor
    from orchestrator.bench.advisor.thresholds import run_thresholds
    from orchestrator.cli.render.advice_view import advice_lines, outcome_json, threshold_lines, thresholds_json
    from orchestrator.cli.session import print_json

    with tempfile.TemporaryDirectory(prefix="orch-advise-") as logs:
        if policy == "thresholds":
            parameters, found = run_thresholds(request, environ=session.environ, logs=Path(logs))
            document = thresholds_json(request.model_name, parameters, found)
            lines = threshold_lines(parameters, found)
        else:
            outcome = run_advisor(request, environ=session.environ, logs=Path(logs), note=session.console.note)
            document = outcome_json(request.model_name, outcome)
            lines = advice_lines(session.console, outcome)
    if as_json:
        print_json(session, document)
    else:
        for line in lines:
            session.console.print(line)
    return EXIT_OK
