"""Runs a benchmark from its request to its files: JSON per mode, a log per run, the comparison report, graphs.

Needs neither Ray nor a daemon; ranks are processes of this machine. Each cell runs once a round, on ranks that are started once,
while the ranks' GPUs are read. A failed cell is reported and left out of the remaining rounds; the others continue with new ranks.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from orchestrator.bench.plan import BenchError, RankError, cells_of, check, device_of, name_of, ranks_of, rounds
from orchestrator.bench.processes import RankProcesses, make_logs, rank_environ
from orchestrator.bench.report import Subject, render_report, write_plots
from orchestrator.bench.results import CellResult, GpuUse, cell_json, compare, comparison_json, run_of
from orchestrator.gpu.load import known_mean
from orchestrator.gpu.sample import Detail, GpuReadError
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.bench.plan import BenchRequest, Cell
    from orchestrator.gpu.sample import GpuReader, Sample

EVERY_SECONDS: Final = 0.1


class GpuWatch:
    """Reads GPUs in a thread of its own while a run is made. Without GPUs it does nothing."""

    def __init__(self, readers: Sequence[GpuReader], every_seconds: float = EVERY_SECONDS) -> None:
        self._readers = readers
        self._every_seconds = every_seconds
        self._samples: list[list[Sample]] = [[] for _ in readers]
        self._energy: list[list[float]] = [[] for _ in readers]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        self._read(Detail.FULL)
        if self._readers:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._readers:
            self._thread.join()
        self._read(Detail.FULL)

    def _follow(self) -> None:
        while not self._over.wait(self._every_seconds):
            self._read(Detail.LOAD)

    def _read(self, detail: Detail) -> None:
        for reader, samples, energy in zip(self._readers, self._samples, self._energy, strict=True):
            try:
                sample = reader.read(detail)
            except GpuReadError:
                continue  # one reading less for this GPU
            samples.append(sample)
            if sample.energy_joules is not None:
                energy.append(sample.energy_joules)

    def use(self) -> GpuUse:
        """Return the figures; call it after the end of the watch."""
        loads = [known_mean([s.utilization for s in samples]) for samples in self._samples]
        powers = [known_mean([s.power_watts for s in samples]) for samples in self._samples]
        joules = [one[-1] - one[0] if len(one) > 1 else None for one in self._energy]
        return GpuUse(utilization=known_mean(loads), power_watts=_sum(powers), energy_joules=_sum(joules))


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


_PREFIXES: Final = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_", "MKL_", "CUDA_", "HIP_", "ROCR_")
_TOPOLOGY_SECONDS: Final = 15.0
_MAX_TOPOLOGY: Final = 20_000
_TERMINAL_CODES: Final = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its header, for a pipe as well


def describe_environment(
    torch_sees: Mapping[str, Any], readers: Sequence[GpuReader], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the environment as plain values. ``torch_sees`` is a rank's description of itself."""
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads_per_rank": torch_sees["threads"],
        "load_average": list(os.getloadavg()),
        "system": f"{platform.system()} {platform.release()}",
        "versions": torch_sees["versions"],
        "gpus": [_gpu(reader) for reader in readers],
        "topology": topology() if readers else None,
        "settings": {name: value for name, value in sorted(environ.items()) if name.startswith(_PREFIXES)},
    }


def _gpu(reader: GpuReader) -> dict[str, Any]:
    info = reader.info
    found: dict[str, Any] = {"model": info.model, "uuid": info.uuid, "driver": info.driver_version}
    try:
        sample = reader.read(Detail.FULL)
    except GpuReadError as error:
        return {**found, "problem": str(error)}
    return {**found, "clocks_hertz": dict(sample.clocks), "power_limit_watts": sample.power_limit_watts}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def topology() -> str | None:
    """Return the links between GPUs as the vendor's tool prints them; None where it is not installed or fails."""
    for tool, arguments in (("nvidia-smi", ["topo", "-m"]), ("rocm-smi", ["--showtopo"])):
        if shutil.which(tool) is None:
            continue
        try:
            ended = subprocess.run(
                [tool, *arguments], capture_output=True, text=True, timeout=_TOPOLOGY_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if ended.returncode == 0:
            return _TERMINAL_CODES.sub("", ended.stdout)[:_MAX_TOPOLOGY]
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The ranks' device, torch's description of it, the model's parameters, readers of the GPUs in the ranks' order."""

    device: str
    torch_sees: Mapping[str, Any]
    parameters: int
    readers: tuple[GpuReader, ...] = ()

    @property
    def gpus(self) -> int:
        """Number of GPUs that ranks may use; 0 where they compute on processors."""
        return len(self.torch_sees["gpus"]) if self.device == "cuda" else 0


class Rounds:
    """The runs of all cells, round by round."""

    def __init__(
        self, request: BenchRequest, machine: Machine, cells: Sequence[Cell], logs: Path, environ: Mapping[str, str]
    ) -> None:
        self._request = request
        self._machine = machine
        self._results = {cell: CellResult(cell=cell) for cell in cells}
        self._logs = logs
        self._environ = environ
        self._ranks: RankProcesses | None = None

    def all(self, note: Callable[[str], None]) -> tuple[CellResult, ...]:
        """Make every run; return the results in the order of the cells."""
        began, reported = time.monotonic(), -1
        try:
            for number, cell in rounds(tuple(self._results), self._request.runs):
                if number != reported and number:
                    left = (time.monotonic() - began) / number * (self._request.runs - number)
                    note(f"round {number} of {self._request.runs} done, about {left:.0f}s left")
                reported = number
                if not self._results[cell].error:
                    self._one(number, cell, note)
        finally:
            self._close()
        return tuple(self._results.values())

    def _one(self, number: int, cell: Cell, note: Callable[[str], None]) -> None:
        result, request = self._results[cell], self._request
        command = {
            "do": "measure",
            "model": cell.model or request.model,
            "seed": request.seed,
            "ranks": cell.ranks,
            "batch": cell.batch,
            "steps": request.steps,
            "precision": cell.precision or request.precision,
            "accumulate": cell.accumulate,
            "gpus": cell.gpus,
        }
        try:
            ranks = self._joined()
            with GpuWatch(self._machine.readers[: cell.gpus or cell.ranks]) as watch:
                answers = ranks.ask(command, cell.ranks)
        except RankError as error:
            self._close()
            self._results[cell] = replace(result, error=error.message)
            note(f"{plural(cell.ranks, 'rank')}, global batch {cell.batch}: {error.message}")
            return
        self._log(number, cell, answers)
        run = run_of(number, cell, answers, request.steps, watch.use())
        self._results[cell] = replace(result, runs=(*result.runs, run))

    def _joined(self) -> RankProcesses:
        """Return the ranks, started again if one has failed."""
        if self._ranks is None:
            sizes = sorted({cell.ranks for cell in self._results})
            self._ranks = RankProcesses(self._logs, self._environ)
            self._ranks.start(sizes[-1])
            self._ranks.join(sizes, self._machine.device)
            if self._request.memory_limit_bytes is not None:
                self._ranks.ask({"do": "limit_memory", "limit_bytes": self._request.memory_limit_bytes}, sizes[-1])
        return self._ranks

    def _close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _log(self, number: int, cell: Cell, answers: Sequence[Mapping[str, Any]]) -> None:
        """Write all measurements of the ranks in a run, including every step's time, to a file."""
        path = self._logs / f"{name_of(cell.model) or self._request.model_name}_{cell.name}_run{number:03}.json"
        path.write_text(json.dumps({"run": number, "batch_size": cell.batch, "ranks": list(answers)}) + "\n")


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

    def cells(machine: Machine) -> tuple[Cell, ...]:
        return cells_of(request, ranks_of(request, gpus=machine.gpus))

    machine, results, environment = measure(request, environ, note, cells)
    return _write(request, machine, results, environment, note)


def measure(
    request: BenchRequest,
    environ: Mapping[str, str],
    note: Callable[[str], None],
    cells_for: Callable[[Machine], Sequence[Cell]],
) -> tuple[Machine, tuple[CellResult, ...], dict[str, Any]]:
    """Make all runs of a machine's cells; return the machine, the results, and the environment. Raises BenchError when no run ended."""
    logs = make_logs(request.output)
    environ = rank_environ(environ, request.threads)
    with RankProcesses(logs, environ) as ranks:
        machine = look_at(ranks, request)
    try:
        cells = cells_for(machine)
        _note_plan(request, machine, cells, note)
        environment = describe_environment(machine.torch_sees, machine.readers, environ)
        results = Rounds(request, machine, cells, logs, environ).all(note)
    finally:
        for reader in machine.readers:
            reader.close()
    if not any(one.runs for one in results):
        raise BenchError(f"no run ended: {results[0].error}", hint=f"the ranks' output is in {logs}")
    return machine, results, environment


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


def _note_plan(request: BenchRequest, machine: Machine, cells: Sequence[Cell], note: Callable[[str], None]) -> None:
    note(f"{request.model_name}: {machine.parameters} trainable parameters")
    most, cpus = max(cell.ranks for cell in cells), len(os.sched_getaffinity(0))
    if machine.device == "cpu" and most * request.threads > cpus:
        threads = plural(request.threads, "thread")
        note(f"{most} ranks with {threads} each share {cpus} processors: they slow each other down")
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
