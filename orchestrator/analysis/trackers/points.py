"""Points for trackers: values of a job's metrics and of its GPUs, under the names of the sources. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from orchestrator.gpu.load import GpuLoad, Quantity, balance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIB: Final = 2**20
MOST_VALUES: Final = 4096
CV_NAMES: Final = {
    Quantity.UTILIZATION: "gpu_load_balance_cv",
    Quantity.MEMORY: "gpu_memory_balance_cv",
    Quantity.POWER: "gpu_power_balance_cv",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Values at one time: ``number`` counts a job's points from 0, ``step`` is the newest optimizer step then."""

    number: int
    at: float
    step: int
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class GpuWindow:
    """One GPU's samples of a span of time: utilization as a ratio, memory in bytes, watts, degrees Celsius."""

    utilization: list[float] = field(default_factory=list)
    memory_bytes: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    celsius: list[float] = field(default_factory=list)


def gpu_values(windows: Sequence[tuple[int, GpuWindow]]) -> dict[str, float]:
    """Return the values of a job's GPUs, each by its number among them; what was not measured is left out.

    Memory in MiB, load in percent, power in watts, CVs in percent, as gputop and the scripts around it write them.
    """
    found: dict[str, float] = {}
    for number, window in windows:
        for name, values, factor in (
            ("memory", window.memory_bytes, 1 / MIB),
            ("utilization", window.utilization, 100.0),
            ("power", window.watts, 1.0),
            ("temperature", window.celsius, 1.0),
        ):
            if values:
                found[f"gpu_{number}_{name}"] = fmean(values) * factor
    memory, load, power = (_each(found, name) for name in ("memory", "utilization", "power"))
    heat = [max(window.celsius) for _, window in windows if window.celsius]
    found |= {"gpu_count": float(len(windows))}
    found |= {"gpu_total_memory": sum(memory), "gpu_avg_memory": fmean(memory)} if memory else {}
    found |= {"gpu_avg_utilization": fmean(load)} if load else {}
    found |= {"gpu_total_power": sum(power), "gpu_avg_power": fmean(power)} if power else {}
    found |= {"gpu_max_temperature": max(heat)} if heat else {}
    return found | _spreads(windows)


def _each(found: Mapping[str, float], name: str) -> list[float]:
    return [value for key, value in found.items() if key.endswith(f"_{name}")]


def _spreads(windows: Sequence[tuple[int, GpuWindow]]) -> dict[str, float]:
    loads = {str(number): _load(window) for number, window in windows}
    spreads = balance({number: load for number, load in loads.items() if load is not None})
    return {
        name: 100.0 * spread.cv
        for quantity, name in CV_NAMES.items()
        if (spread := spreads.spread(quantity)) is not None
    }


def _load(window: GpuWindow) -> GpuLoad | None:
    mean = [fmean(values) if values else None for values in (window.utilization, window.memory_bytes, window.watts)]
    return None if mean[0] is None else GpuLoad(utilization=mean[0], memory=mean[1], power=mean[2])


def to_json(point: Point) -> list[Any]:
    """Return a point as the journal keeps it."""
    # JSON has no NaN and no infinity, and a diverged loss is one.
    values = {name: value if math.isfinite(value) else str(value) for name, value in point.values.items()}
    return [point.number, point.at, point.step, values]


def from_json(body: Any) -> Point:
    """Return the point that ``to_json`` wrote. Raises ValueError, TypeError."""
    number, at, step, values = body
    if not (_whole(number) and _whole(step) and isinstance(values, dict) and len(values) <= MOST_VALUES):
        raise ValueError("no point")
    if not all(isinstance(name, str) for name in values):
        raise ValueError("no names")
    return Point(number=number, at=float(at), step=step, values={name: float(value) for name, value in values.items()})


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 2**53


def parse_line(line: bytes) -> tuple[float, int | None, dict[str, float]] | None:
    """Return time, step and values of a line of ``metrics.jsonl``; None for a line that orch does not write."""
    try:
        body = json.loads(line)
        at, step, metrics = float(body["at"]), body["step"], body["metrics"]
        if not math.isfinite(at) or not (step is None or _whole(step)) or not isinstance(metrics, dict):
            return None
        if len(metrics) > MOST_VALUES:
            return None
        values = {
            name: math.nan if value is None else float(value)
            for name, value in metrics.items()
            if value is None or type(value) in (int, float)
        }
        for name in ("epoch", "samples", "tokens", "step_seconds", "attempt"):
            value = body.get(name)
            if type(value) in (int, float) and math.isfinite(value):
                values.setdefault(name, float(value))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return at, step, values
