"""Builds a recording's rows: gputop's JSON entries and the power log's CSV rows, from samples.

Formats and units are those files' own (MiB, per cent, MHz, local time without a zone), so that their tools read ours;
our own keys are added to theirs, never in place of them. A missing value leaves its CSV cell empty. In JSON it is 0,
because those tools fail with a KeyError for a missing key; the key `absent` lists such keys, so that a reader can
distinguish a missing sensor from a reading of 0.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from orchestrator.gpu.sample import Detail, Vendor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.gpu.sample import GpuInfo, Sample
    from orchestrator.gpu.sampler import Reading

MIB: Final = 1 << 20
CARRY_SECONDS: Final = 2.0
"""A value that is read less often than rows are written is repeated for at most this long."""

VENDOR_NAMES: Final = {
    Vendor.NVIDIA: "NVIDIA",
    Vendor.AMD: "AMD",
    Vendor.INTEL: "Intel",
    Vendor.SIMULATED: "simulated",
}


MULTI_KEYS: Final[Mapping[str, Any]] = {
    "utilization": 0,
    "memory_used": 0,
    "memory_total": 0,
    "memory_percent": 0,
    "temperatures": {},
    "power": 0,
    "power_limit": 0,
    "clocks": {},
}
"""Keys that gputop's readers look up in each GPU of a multi-GPU entry, with the values that stand for missing ones."""
SINGLE_KEYS: Final[Mapping[str, Any]] = {
    **MULTI_KEYS,
    "temp_limits": {},
    "fan_speed": 0,
    "clock_states": {},
    "performance_level": "unknown",
}
AGGREGATE_KEYS: Final[Mapping[str, Any]] = {
    "total_memory_used": 0,
    "total_memory_total": 0,
    "total_memory_percent": 0,
    "average_utilization": 0,
    "total_power": 0,
    "total_power_limit": 0,
    "max_temperature": 0,
}
ABSENT: Final = "absent"


def _whole(entry: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry with every key that gputop's readers expect; zeros that are not readings are listed under `absent`."""
    missing = {key: value for key, value in expected.items() if key not in entry}
    absent = [key for key, value in missing.items() if value == 0]
    return {**entry, **missing, **({ABSENT: absent} if absent else {})}


class View:
    """A GPU as a row shows it: the newest power, with slower values carried along."""

    __slots__ = ("_full", "_load", "info", "power")

    def __init__(self, info: GpuInfo) -> None:
        """Start with a GPU that has not answered yet."""
        self.info = info
        self.power: Sample | None = None
        self._load: Sample | None = None
        self._full: Sample | None = None

    def update(self, reading: Reading | None) -> None:
        """Add the tick's reading; None when the GPU gave none, which leaves its row empty."""
        self.power = reading.sample if reading is not None else None
        if reading is not None and reading.detail is not Detail.POWER:
            self._load = reading.sample
            if reading.detail is Detail.FULL:
                self._full = reading.sample

    @property
    def load(self) -> Sample | None:
        """The newest sample with utilization, memory, clocks and temperatures; None when it is too old to repeat."""
        return self._recent(self._load)

    @property
    def full(self) -> Sample | None:
        """The newest sample with everything; None when it is too old to repeat."""
        return self._recent(self._full)

    def _recent(self, sample: Sample | None) -> Sample | None:
        if sample is None or self.power is None or self.power.monotonic - sample.monotonic > CARRY_SECONDS:
            return None
        return sample


def local_time(timestamp: float) -> str:
    """Return Unix time as local time without a zone, in milliseconds: 2025-01-15T10:30:00.123."""
    return dt.datetime.fromtimestamp(timestamp).isoformat(timespec="milliseconds")  # noqa: DTZ006  # the files' format


# ------------------------------------------------------------------------------------------------------------------- CSV


def _cell(part: str, name: str, pattern: str, factor: float = 1.0) -> Callable[[View], str]:
    """Return a column of the values `name` of a view's `part` ("power", "load", "full"); empty where one is absent."""

    def cell(view: View) -> str:
        sample = getattr(view, part)
        value = None if sample is None else getattr(sample, name)
        return "" if value is None else pattern % (value * factor)

    return cell


def _sm_clock(view: View) -> str:
    clocks = dict(view.load.clocks) if view.load is not None else {}
    hertz = clocks.get("sm", clocks.get("graphics"))
    return "" if hertz is None else f"{hertz / 1e6:.0f}"


def _throttle(view: View) -> str:
    return "|".join(view.full.throttle_active) if view.full is not None else ""


BASE_COLUMNS: Final = ("power_w", "temp_c")
COLUMNS: Final[dict[str, Callable[[View], str]]] = {
    "power_w": _cell("power", "power_watts", "%.3f"),
    "temp_c": _cell("load", "temperature", "%.0f"),
    "util_pct": _cell("load", "utilization", "%.0f", 100.0),
    "mem_used_mib": _cell("load", "memory_used_bytes", "%.0f", 1.0 / MIB),
    "sm_clock_mhz": _sm_clock,
    "energy_j": _cell("full", "energy_joules", "%.3f"),
    "power_limit_w": _cell("full", "power_limit_watts", "%.1f"),
    "fan_pct": _cell("full", "fan", "%.0f", 100.0),
    "throttle": _throttle,
    "fresh": _cell("power", "fresh", "%d", 1),
}
"""Columns that a CSV can have for each GPU, by the column's name after `gpuN_`."""


def csv_header(infos: Sequence[GpuInfo], columns: Sequence[str]) -> str:
    """Return the first line: timestamp, elapsed_sec, then each GPU's columns."""
    names = [f"gpu{info.index}_{column}" for info in infos for column in columns]
    return ",".join(["timestamp", "elapsed_sec", *names])


def csv_row(timestamp: float, elapsed: float, views: Sequence[View], cells: Sequence[Callable[[View], str]]) -> str:
    """Return one line for all GPUs at one tick; `cells` are the entries of `COLUMNS` for the wanted columns."""
    values = [cell(view) for view in views for cell in cells]
    return ",".join([local_time(timestamp), f"{elapsed:.3f}", *values])


# ------------------------------------------------------------------------------------------------------------------ JSON


def _gpu_entry(view: View) -> dict[str, Any]:
    """Return the values of a GPU that the single and the multi-GPU form share."""
    entry: dict[str, Any] = {"gpu_index": view.info.index, "gpu_name": view.info.model}
    load, full, power = view.load, view.full, view.power
    if load is not None:
        if load.utilization is not None:
            entry["utilization"] = round(load.utilization * 100, 1)
        used, total = load.memory_used_bytes, load.memory_total_bytes
        if used is not None:
            entry["memory_used"] = round(used / MIB, 1)
        if total:
            entry["memory_total"] = round(total / MIB, 1)
            if used is not None:
                entry["memory_percent"] = round(100 * used / total, 1)
    if load is not None and load.temperatures:
        entry["temperatures"] = {
            _sensor_name(name): round(celsius, 1) for name, celsius in _all_temperatures(load, full)
        }
    if power is not None and power.power_watts is not None:
        entry["power"] = round(power.power_watts, 3)
    if full is not None and full.power_limit_watts is not None:
        entry["power_limit"] = round(full.power_limit_watts, 1)
    if load is not None and load.clocks:
        clocks = {domain: round(hertz / 1e6) for domain, hertz in load.clocks}
        if "sm" in clocks:
            clocks = {"gpu": clocks["sm"], **clocks}  # gputop's name for it
        entry["clocks"] = clocks
    return entry


def _all_temperatures(load: Sample, full: Sample | None) -> list[tuple[str, float]]:
    """Return the newest temperatures, and the last ones of the sensors that are read less often."""
    now = dict(load.temperatures)
    return [
        *now.items(),
        *((name, celsius) for name, celsius in (full.temperatures if full else ()) if name not in now),
    ]


def _sensor_name(sensor: str) -> str:
    """Return a sensor's name as gputop writes it: GPU, Memory, Edge, Junction."""
    return "GPU" if sensor == "gpu" else sensor.capitalize()


def single_entry(timestamp: float, elapsed: float, view: View, training: Mapping[str, Any]) -> dict[str, Any]:
    """Return one element of `gpu_stats_NAME_TIME.json`."""
    entry = {"timestamp": local_time(timestamp), **_gpu_entry(view)}
    entry["gpu_type"] = VENDOR_NAMES[view.info.vendor]
    entry["gpu_uuid"] = view.info.uuid
    entry["elapsed_seconds"] = round(elapsed, 3)
    power, load, full = view.power, view.load, view.full
    if load is not None and load.temperature is not None:
        entry["temperature"] = round(load.temperature, 1)
    if power is not None:
        entry["fresh"] = power.fresh
    if full is not None:
        if full.temperature_limits:
            limits: dict[str, dict[str, float]] = {}
            for sensor, limit, celsius in full.temperature_limits:
                limits.setdefault(_sensor_name(sensor), {})[limit] = celsius
            entry["temp_limits"] = limits
        if full.fan is not None:
            entry["fan_speed"] = round(full.fan * 100)
        if full.energy_joules is not None:
            entry["energy_joules"] = round(full.energy_joules, 3)
        if full.throttle_active:
            entry["throttle"] = list(full.throttle_active)
    if training:
        entry["training_metadata"] = dict(training)
    return _whole(entry, SINGLE_KEYS)


def multi_entry(timestamp: float, elapsed: float, views: Sequence[View], training: Mapping[str, Any]) -> dict[str, Any]:
    """Return one element of `..._multi_gpu.json`: every GPU that answered, and totals over the very same values."""
    known = [_gpu_entry(view) for view in views if view.power is not None]
    entry: dict[str, Any] = {
        "timestamp": local_time(timestamp),
        "elapsed_seconds": round(elapsed, 3),
        "multi_gpu_data": [_whole(gpu, MULTI_KEYS) for gpu in known],
        "aggregate_stats": _aggregate(known),
    }
    if training:
        entry["training_metadata"] = dict(training)
    return entry


def _aggregate(data: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return totals over the GPUs that have the value; a total without any value is 0 and listed under `absent`."""

    def values(key: str) -> list[float]:
        return [entry[key] for entry in data if key in entry]

    stats: dict[str, Any] = {}
    for total, key in (("total_memory_used", "memory_used"), ("total_memory_total", "memory_total")):
        if values(key):
            stats[total] = round(sum(values(key)), 1)
    if "total_memory_used" in stats and stats.get("total_memory_total"):
        stats["total_memory_percent"] = round(100 * stats["total_memory_used"] / stats["total_memory_total"], 1)
    if values("utilization"):
        stats["average_utilization"] = round(sum(values("utilization")) / len(values("utilization")), 1)
    for total, key in (("total_power", "power"), ("total_power_limit", "power_limit")):
        if values(key):
            stats[total] = round(sum(values(key)), 3)
    hottest = [celsius for entry in data for celsius in entry.get("temperatures", {}).values()]
    if hottest:
        stats["max_temperature"] = max(hottest)
    stats["gpu_count"] = len(data)
    return _whole(stats, AGGREGATE_KEYS)
