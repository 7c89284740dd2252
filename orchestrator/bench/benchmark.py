"""Runs a benchmark from its request to its files: JSON per mode, a log per run, the comparison report, graphs.

Needs neither Ray nor a daemon; ranks are processes of this machine. A failed cell is reported and left out of the
remaining rounds; the others continue with new ranks.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.bench.environment import describe_environment
from orchestrator.bench.errors import BenchError, RankError
from orchestrator.bench.plan import cells_of, check, device_of, ranks_of
from orchestrator.bench.plots import write_plots
from orchestrator.bench.processes import RankProcesses, make_logs, rank_environ
from orchestrator.bench.report import Subject, render_report
from orchestrator.bench.results import CellResult, cell_json, compare, comparison_json
from orchestrator.bench.rounds import Machine, Rounds
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from orchestrator.bench.plan import BenchRequest, Cell
    from orchestrator.gpu.sample import GpuReader

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a benchmark: the documents by mode, the report where there was something to compare, the files."""

    results: tuple[CellResult, ...]
    documents: Mapping[str, Mapping[str, Any]]
    report: str
    files: tuple[Path, ...]


def run_benchmark(request: BenchRequest, *, environ: Mapping[str, str], note: Callable[[str], None]) -> Outcome:
    """Measure as requested and write the files. Raises BenchError for an invalid request, or when no run ended."""
    check(request)
    logs = make_logs(request.output)
    environ = rank_environ(environ, request.threads)
    with RankProcesses(logs, environ) as ranks:
        machine = look_at(ranks, request)
        sizes = ranks_of(request, gpus=len(machine.torch_sees["gpus"]) if machine.device == "cuda" else 0)
        cells = cells_of(request, sizes)
    _note_plan(request, machine, cells, environ, note)
    environment = describe_environment(machine.torch_sees, machine.readers, environ)
    try:
        results = Rounds(request, machine, cells, logs, environ).all(note)
    finally:
        for reader in machine.readers:
            reader.close()
    if not any(one.runs for one in results):
        raise BenchError(f"no run ended: {results[0].error}", hint=f"the ranks' output is in {logs}")
    return _write(request, machine, results, environment, note)


def look_at(ranks: RankProcesses, request: BenchRequest) -> Machine:
    """Inspect the machine through a first rank, which tries the model. Raises BenchError for a model that does not fit."""
    ranks.start(1)
    (seen,) = ranks.ask({"do": "describe"}, 1)
    device = device_of(request, gpus=len(seen["gpus"]))
    try:
        (loaded,) = ranks.ask({"do": "load", "model": request.model, "seed": request.seed, "batch": 2}, 1)
    except RankError as error:
        raise BenchError(error.message.removeprefix("rank 0: "), hint=error.hint) from error
    readers = _readers([gpu["uuid"] for gpu in seen["gpus"]]) if device == "cuda" else ()
    return Machine(device=device, torch_sees=seen, parameters=loaded["parameters"], readers=readers)


def _readers(uuids: Sequence[str]) -> tuple[GpuReader, ...]:
    """Return readers in torch's order of GPUs; none where the driver does not list one of them by its id."""
    from orchestrator.gpu.drivers.inventory import survey

    found = {reader.info.uuid.removeprefix("GPU-"): reader for reader in survey().readers}
    wanted = [uuid.removeprefix("GPU-") for uuid in uuids]
    chosen = tuple(found[uuid] for uuid in wanted if uuid in found)
    for uuid, reader in found.items():
        if uuid not in wanted:
            reader.close()
    return chosen if len(chosen) == len(wanted) else ()


def _note_plan(
    request: BenchRequest,
    machine: Machine,
    cells: Sequence[Cell],
    environ: Mapping[str, str],
    note: Callable[[str], None],
) -> None:
    note(f"{request.model_name}: {machine.parameters} trainable parameters")
    most = max(cell.ranks for cell in cells)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if machine.device == "cpu" and most * request.threads > cpus:
        threads = environ["OMP_NUM_THREADS"]
        note(
            f"{most} ranks with {plural(int(threads), 'thread')} each share {cpus} processors: they slow each other down"
        )
    note(f"{plural(len(cells), 'configuration')}, {plural(request.runs, 'run')} each, in turn")


def _write(
    request: BenchRequest,
    machine: Machine,
    results: tuple[CellResult, ...],
    environment: Mapping[str, Any],
    note: Callable[[str], None],
) -> Outcome:
    """Write the files of a benchmark; return its outcome."""
    name, generated = request.model_name, time.strftime("%Y-%m-%d %H:%M:%S")
    documents, files = {}, []
    for mode in ("single", "multi"):
        mine = [one for one in results if (one.cell.ranks > 1) == (mode == "multi")]
        if not mine:
            continue
        documents[mode] = {
            "schema": SCHEMA,
            "generated": generated,
            "device": machine.device,
            "batch_size_is": "global: all ranks together",
            "runs": request.runs,
            "steps": request.steps,
            "environment": environment,
            "results": [
                cell_json(one, model=name, parameters=machine.parameters, precision=request.precision) for one in mine
            ],
        }
        if mode == "multi":
            documents[mode]["comparisons"] = [comparison_json(one) for one in compare(results)]
        files.append(request.output / f"benchmark_{name}_{mode}_gpu.json")
        files[-1].write_text(json.dumps(documents[mode], indent=2) + "\n")
    subject = Subject(
        model=name,
        parameters=machine.parameters,
        precision=request.precision,
        device=environment["gpus"][0]["model"] if environment["gpus"] else machine.device,
        runs=request.runs,
        steps=request.steps,
        generated=generated,
        environment=environment,
        price_per_gpu_hour=request.price_per_gpu_hour,
    )
    report = render_report(subject, results)
    files.append(request.output / f"comparison_report_{name}.md")
    files[-1].write_text(report)
    try:
        files += write_plots(results, name, request.output)
    except BenchError as error:
        note(f"{error.message}: {error.hint}")
    return Outcome(results=results, documents=documents, report=report, files=tuple(files))
