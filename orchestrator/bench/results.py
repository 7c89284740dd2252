"""Combines runs: one summary per cell, comparisons at equal global batch, and their JSON.

JSON keys are the same as in the benchmark that this one replaces (`mean_samples_per_sec`, `confidence_interval_95`,
`detailed_runs`, ...), with their units; values that were not measured are null.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from orchestrator.bench.statistics import deviation, mean_interval, outliers, ratio_interval
from orchestrator.gpu.load import known_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.analysis.statistics import Interval
    from orchestrator.bench.plan import Cell

MIB = 1 << 20
SOURCE_PAYS = 1.1
"""Least low end of a speed-up's interval at which more GPUs are called beneficial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """Use of all watched GPUs together, including warm-up and controls; None where they do not report a value."""

    utilization: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a mean step's seconds. ``other`` is the rest: the slowdown of computation by communication, and noise."""

    compute: float
    exposed: float
    hidden: float
    other: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one cell, over all its ranks. Peak memory is the most of any device, all memory that of all."""

    number: int
    samples_per_second: float
    step_seconds: float
    parts: Parts
    peak_memory_bytes: int
    all_memory_bytes: int
    reduced_bytes: float
    buckets: int
    warm_up_steps: int
    stable: bool
    gpu: GpuUse


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The completed runs of a cell, or the error that prevented them."""

    cell: Cell
    runs: tuple[Run, ...] = ()
    error: str = ""

    @property
    def throughputs(self) -> list[float]:
        """Samples per second of each run."""
        return [run.samples_per_second for run in self.runs]

    @property
    def throughput(self) -> Interval:
        """Mean samples per second of at least one run."""
        return mean_interval(self.throughputs)

    @property
    def parts(self) -> Parts:
        """The mean of each part over the runs."""
        return Parts(**{name: fmean(getattr(run.parts, name) for run in self.runs) for name in Parts.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A cell against one rank at the same global batch. ``finding`` is faster, slower or unclear: by the interval alone."""

    single: CellResult
    multi: CellResult
    speed_up: Interval
    finding: str

    @property
    def efficiency(self) -> float:
        """Speed-up per rank."""
        return self.speed_up.value / self.multi.cell.ranks


def exposed_share(result: CellResult) -> list[float]:
    """Return, for each run, the share of a step that is spent waiting for communication."""
    return [run.parts.exposed / run.step_seconds for run in result.runs]


def run_of(number: int, cell: Cell, answers: Sequence[Mapping[str, Any]], steps: int, gpu: GpuUse) -> Run:
    """Combine the ranks' answers to a run: its duration is that of its slowest rank; parts are means over ranks."""
    seconds = max(answer["seconds"] for answer in answers)
    step = seconds / steps
    compute, exposed, hidden = (
        fmean(answer["parts"][f"{name}_seconds"] for answer in answers) for name in ("compute", "exposed", "hidden")
    )
    return Run(
        number=number,
        samples_per_second=cell.batch * steps / seconds,
        step_seconds=step,
        parts=Parts(compute=compute, exposed=exposed, hidden=hidden, other=step - compute - exposed),
        peak_memory_bytes=max(answer["peak_memory_bytes"] for answer in answers),
        all_memory_bytes=sum(answer["all_memory_bytes"] for answer in answers),
        reduced_bytes=answers[0]["parts"]["bytes"],
        buckets=int(answers[0]["parts"]["buckets"]),
        warm_up_steps=answers[0]["warm_up_steps"],
        stable=all(answer["stable"] for answer in answers),
        gpu=gpu,
    )


def compare(results: Sequence[CellResult]) -> tuple[Comparison, ...]:
    """Compare every cell of several ranks with one rank at the same global batch, where both have runs."""
    singles = {one.cell.batch: one for one in results if one.cell.ranks == 1 and one.runs}
    found = []
    for multi in results:
        single = singles.get(multi.cell.batch)
        if multi.cell.ranks == 1 or not multi.runs or single is None:
            continue
        speed_up = ratio_interval(multi.throughputs, single.throughputs)
        found.append(Comparison(single=single, multi=multi, speed_up=speed_up, finding=finding_of(speed_up)))
    return tuple(found)


def finding_of(speed_up: Interval) -> str:
    """Return the result that the interval supports."""
    low, high = speed_up.bounds or (1.0, 1.0)
    return "faster" if low > 1 else "slower" if high < 1 else "unclear"


def cell_json(result: CellResult, *, model: str, parameters: int | None, precision: str) -> dict[str, Any]:
    """Return one entry of ``results``."""
    cell = result.cell
    head: dict[str, Any] = {
        "batch_size": cell.batch,
        "batch_size_per_rank": cell.per_rank,
        "ranks": cell.ranks,
        "model_type": model,
        "multi_gpu": cell.ranks > 1,
        "precision": precision,
        "model_parameters": parameters,
        "num_runs": len(result.runs),
    }
    if not result.runs:
        return {**head, "error": result.error, "detailed_runs": []}
    parts = result.parts
    return {
        **head,
        "mean_samples_per_sec": result.throughput.value,
        "std_samples_per_sec": deviation(result.throughputs),
        "confidence_interval_95": result.throughput.bounds,
        "mean_step_ms": fmean(run.step_seconds for run in result.runs) * 1e3,
        "mean_memory_mb": fmean(run.peak_memory_bytes for run in result.runs) / MIB,
        "mean_gpu_utilization": _mean_percent([run.gpu.utilization for run in result.runs]),
        "mean_communication_ms": (parts.exposed + parts.hidden) * 1e3,
        "mean_compute_ms": parts.compute * 1e3,
        "mean_exposed_communication_ms": parts.exposed * 1e3,
        "mean_hidden_communication_ms": parts.hidden * 1e3,
        "mean_other_ms": parts.other * 1e3,
        "mean_power_watts": known_mean([run.gpu.power_watts for run in result.runs]),
        "mean_energy_joules": known_mean([run.gpu.energy_joules for run in result.runs]),
        "outlier_runs": [result.runs[i].number for i in outliers(result.throughputs)],
        "unstable_runs": [run.number for run in result.runs if not run.stable],
        "error": result.error or None,
        "detailed_runs": [_run_json(run, parameters) for run in result.runs],
    }


def _run_json(run: Run, parameters: int | None) -> dict[str, Any]:
    return {
        "run": run.number,
        "samples_per_second": run.samples_per_second,
        "training_time_ms": run.step_seconds * 1e3,
        "memory_usage_mb": run.peak_memory_bytes / MIB,
        "gpu_utilization": _mean_percent([run.gpu.utilization]),
        "communication_time_ms": (run.parts.exposed + run.parts.hidden) * 1e3,
        "compute_time_ms": run.parts.compute * 1e3,
        "exposed_communication_ms": run.parts.exposed * 1e3,
        "hidden_communication_ms": run.parts.hidden * 1e3,
        "other_ms": run.parts.other * 1e3,
        "reduced_bytes_per_step": run.reduced_bytes,
        "buckets": run.buckets,
        "power_watts": run.gpu.power_watts,
        "energy_joules": run.gpu.energy_joules,
        "warm_up_steps": run.warm_up_steps,
        "stable": run.stable,
        "model_parameters": parameters,
    }


def _mean_percent(values: Sequence[float | None]) -> float | None:
    mean = known_mean(values)
    return None if mean is None else mean * 100


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return one entry of ``comparisons``."""
    return {
        "batch_size": comparison.multi.cell.batch,
        "ranks": comparison.multi.cell.ranks,
        "speedup": comparison.speed_up.value,
        "speedup_interval_95": comparison.speed_up.bounds,
        "efficiency": comparison.efficiency,
        "finding": comparison.finding,
    }
