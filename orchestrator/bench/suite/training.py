"""Runs the training suite: measures its configurations in turn, compares the claims with them, writes JSON and a report."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from orchestrator.bench.benchmark import look_at
from orchestrator.bench.environment import describe_environment
from orchestrator.bench.errors import BenchError
from orchestrator.bench.plan import check, ranks_of
from orchestrator.bench.processes import RankProcesses, make_logs, rank_environ
from orchestrator.bench.results import cell_json
from orchestrator.bench.rounds import Rounds
from orchestrator.bench.suite.claims import CLAIMS, Checked, check_claim
from orchestrator.bench.suite.quantities import PASSES, Plan, plan_of, quantities
from orchestrator.bench.suite.report import checked_json, render_suite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from orchestrator.bench.plan import BenchRequest, Cell
    from orchestrator.bench.results import CellResult
    from orchestrator.bench.rounds import Machine

SUITES: Final = ("training",)
BATCH: Final = 32
"""Default batch size per rank: that of the document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOutcome:
    """Results of the suite, its report and its files."""

    plan: Plan
    results: Mapping[Cell, CellResult]
    checked: tuple[Checked, ...]
    document: Mapping[str, Any]
    report: str
    files: tuple[Path, ...]


def check_suite(name: str, request: BenchRequest) -> None:
    """Raise BenchError for an unknown suite, or a request with options that it does not support."""
    if name not in SUITES:
        raise BenchError(f"--suite {name} is not known", hint=f"one of: {', '.join(SUITES)}")
    check(request)
    if len(request.batch_sizes) != 1 or request.batch_sizes[0] % PASSES:
        raise BenchError(
            f"--suite training measures one batch size per rank, a multiple of {PASSES}: got "
            f"{','.join(map(str, request.batch_sizes))}",
            hint=f"--batch-sizes {BATCH}",
        )
    if request.precision != "fp32":
        raise BenchError(
            f"--suite training compares fp32 with mixed precision itself, and --precision is {request.precision}",
            hint="leave it out",
        )
    if request.gpu_mode != "auto" or request.scope != "global":
        raise BenchError(
            "--suite training compares one rank with several, with batches per rank: --gpu-mode and --batch-scope have no effect",
            hint="leave both out",
        )


def run_suite(request: BenchRequest, *, environ: Mapping[str, str], note: Callable[[str], None]) -> SuiteOutcome:
    """Measure and write the files. Raises BenchError for a request that cannot be run, or when no run ended."""
    logs = make_logs(request.output)
    environ = rank_environ(environ, request.threads)
    with RankProcesses(logs, environ) as ranks:
        machine = look_at(ranks, request)
    plan = _plan(request, machine)
    note(f"{request.model_name}: {machine.parameters} trainable parameters; {len(plan.cells)} configurations")
    environment = describe_environment(machine.torch_sees, machine.readers, environ)
    try:
        measured = Rounds(request, machine, plan.cells, logs, environ).all(note)
    finally:
        for reader in machine.readers:
            reader.close()
    results = {one.cell: one for one in measured}
    if not any(one.runs for one in measured):
        raise BenchError(f"no run ended: {measured[0].error}", hint=f"the ranks' output is in {logs}")
    return _write(request, machine, plan, results, environment)


def _plan(request: BenchRequest, machine: Machine) -> Plan:
    gpus = len(machine.torch_sees["gpus"]) if machine.device == "cuda" else 0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    usual = tuple(n for n in (1, 2, 4, 8) if n <= max(2, gpus or cpus))
    ranks = ranks_of(request, gpus=gpus) if request.ranks else (usual if not gpus or gpus > 1 else (1,))
    mixed = "fp16" if machine.device == "cuda" else "bf16"
    return plan_of(model=request.model, per_rank=request.batch_sizes[0], ranks=ranks, gpus=gpus, mixed=mixed)


def _write(
    request: BenchRequest,
    machine: Machine,
    plan: Plan,
    results: Mapping[Cell, CellResult],
    environment: Mapping[str, Any],
) -> SuiteOutcome:
    found = quantities(plan, results, on_gpus=machine.device == "cuda")
    checked = tuple(check_claim(claim, found) for claim in CLAIMS)
    generated = time.strftime("%Y-%m-%d %H:%M:%S")
    document = {
        "schema": 1,
        "suite": "training",
        "generated": generated,
        "device": machine.device,
        "batch_size_is": "per rank",
        "runs": request.runs,
        "steps": request.steps,
        "environment": environment,
        "claims": [checked_json(one) for one in checked],
        "results": [
            {
                **cell_json(
                    one,
                    model=cell.model or request.model_name,
                    parameters=machine.parameters if not cell.model else None,
                    precision=cell.precision or "fp32",
                ),
                "accumulate": cell.accumulate,
                "data_parallel_gpus": cell.gpus,
            }
            for cell, one in results.items()
        ],
    }
    report = render_suite(
        request=request, generated=generated, device=machine.device, plan=plan, results=results, checked=checked
    )
    files = (
        request.output / f"training_suite_{request.model_name}.json",
        request.output / f"training_suite_{request.model_name}.md",
    )
    files[0].write_text(json.dumps(document, indent=2) + "\n")
    files[1].write_text(report)
    return SuiteOutcome(plan=plan, results=results, checked=checked, document=document, report=report, files=files)
