"""Reads recordings: gputop's files and related ones, our own, and truncated ones of a crash.

The formats are gputop's single-GPU and multi-GPU arrays, one entry a line instead of an array, monitors that put
their samples under `samples`, and the CSV power log. Units (MiB, per cent, MHz) become base units, and the values
written for a missing sensor (0 W, 0 degrees, 0 MiB of total memory) become None. Nothing is repaired in the file.
"""

from __future__ import annotations

import csv
import datetime as dt
import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from orchestrator.gpu.recording.rows import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


MIB: Final = 1 << 20
_GPU_COLUMN: Final = re.compile(r"gpu(\d+)_(\w+)")


class RecordingError(Exception):
    """The file is not a recording; the message says what was expected."""


def read_recording(path: Path) -> Recording:
    """Read a recording in any of these formats.

    Raises OSError when it is unreadable and RecordingError when it is something else. Invalid entries are counted in
    `dropped`; a truncated end is left out, and `repaired` says so.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if text.lstrip()[:1] in {"[", "{"}:
        entries, dropped, repaired = _json_entries(text)
        rows, unusable = _json_rows(entries)
        dropped += unusable
    else:
        rows, dropped, repaired = _csv_rows(path, text)
    if not rows and not (repaired or dropped or text.split() in (["[", "]"], ["[]"])):
        raise _not_a_recording(path)
    rows.sort(key=lambda row: (row["timestamp"], row["gpu_index"]))
    start = rows[0]["timestamp"] if rows else 0.0
    samples = tuple(RecordedSample(**{"elapsed_seconds": row["timestamp"] - start, **row}) for row in rows)
    return Recording(source=path, samples=samples, dropped=dropped, repaired=repaired)


def _not_a_recording(path: Path) -> RecordingError:
    return RecordingError(
        f"{path} is no GPU recording. Give a gpu_stats_*.json or gpu_metrics_*.csv that `orch record` or gputop wrote."
    )


# ------------------------------------------------------------------------------------------------------------------ JSON


def _json_entries(text: str) -> tuple[list[Any], int, bool]:
    """Return (entries, dropped, repaired) of a JSON text: a whole one, one entry a line, or a truncated array."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        pass
    else:
        if isinstance(document, dict) and isinstance(document.get("samples"), list):
            shared = {key: value for key, value in document.items() if key != "samples"}
            return (
                [{**shared, **entry} if isinstance(entry, dict) else entry for entry in document["samples"]],
                0,
                False,
            )
        return document if isinstance(document, list) else [document], 0, False
    if text.lstrip().startswith("{") and '"samples"' not in text[:4096]:
        return _json_lines(text)
    return _cut_array(text)


def _json_lines(text: str) -> tuple[list[Any], int, bool]:
    entries: list[Any] = []
    dropped = 0
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError):
            if number == len(lines) - 1:
                return entries, dropped, True
            dropped += 1
    return entries, dropped, False


def _cut_array(text: str) -> tuple[list[Any], int, bool]:
    """Return the whole elements of an array without its end."""
    decoder = json.JSONDecoder()
    position = text.find("[") + 1
    entries: list[Any] = []
    while position:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        try:
            entry, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        entries.append(entry)
    return entries, 0, True


def _json_rows(entries: list[Any]) -> tuple[list[dict[str, Any]], int]:
    """Return rows in base units, and the number of invalid entries."""
    rows: list[dict[str, Any]] = []
    dropped = 0
    for number, entry in enumerate(entries):
        before = len(rows)
        if isinstance(entry, dict):
            for gpu in _gpus_of(entry):
                row = _json_row(entry, gpu, number)
                if row is not None:
                    rows.append(row)
        dropped += len(rows) == before
    return rows, dropped


def _gpus_of(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    many = entry.get("multi_gpu_data")
    if isinstance(many, list):
        yield from (gpu for gpu in many if isinstance(gpu, dict))
    elif any(
        key in entry for key in ("utilization", "gpu_utilization", "memory_used", "memory_mb", "power", "gpu_index")
    ):
        yield entry


def _json_row(entry: Mapping[str, Any], gpu: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    timestamp = _time(entry.get("timestamp"))
    if timestamp is None:
        # Better than nothing: seconds since the start where they are given, else the entry's number.
        timestamp = _number(entry.get("elapsed_seconds"))
        timestamp = float(number) if timestamp is None else timestamp
    absent = gpu.get(ABSENT)
    if isinstance(absent, list):  # our own files: 0 because gputop's readers need a number, not because it was read
        gpu = {key: value for key, value in gpu.items() if key not in absent}
    index = _number(gpu.get("gpu_index", gpu.get("gpu_id", 0)))
    if index is None:
        return None
    used = _first(gpu, "memory_used", "memory_used_mb", "memory_mb")
    total = _positive(_first(gpu, "memory_total", "memory_total_mb"))
    utilization = _first(gpu, "utilization", "gpu_utilization")
    temperatures = _temperatures(gpu)
    return {
        "timestamp": timestamp,
        "gpu_index": int(index),
        "gpu_name": _text(gpu.get("gpu_name")),
        "gpu_uuid": _text(gpu.get("gpu_uuid")),
        "vendor": (_text(gpu.get("gpu_type")) or "").lower() or None,
        "utilization": None if utilization is None else utilization / 100,
        "memory_used_bytes": None if used is None else round(used * MIB),
        "memory_total_bytes": None if total is None else round(total * MIB),
        "power_watts": _positive(_number(gpu.get("power"))),
        "power_limit_watts": _positive(_number(gpu.get("power_limit"))),
        "energy_joules": _number(gpu.get("energy_joules")),
        "temperature_celsius": _main_temperature(gpu, temperatures),
        "temperatures": temperatures,
        "temperature_limits": _limits(gpu),
        "clocks": tuple((str(name), hertz * 1e6) for name, hertz in _numbers(gpu.get("clocks"))),
        "fan": _share(_number(gpu.get("fan_speed"))),
        "throttle": tuple(gpu["throttle"]) if isinstance(gpu.get("throttle"), list) else (),
        "fresh": gpu["fresh"] if isinstance(gpu.get("fresh"), bool) else None,
        "training": entry["training_metadata"] if isinstance(entry.get("training_metadata"), dict) else {},
    }


def _temperatures(gpu: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    return tuple((name.lower(), celsius) for name, celsius in _numbers(gpu.get("temperatures")) if celsius > 0)


def _main_temperature(gpu: Mapping[str, Any], temperatures: tuple[tuple[str, float], ...]) -> float | None:
    """Return the GPU's main temperature: the entry's own, else its GPU or edge sensor, else the hottest."""
    own = _positive(_number(gpu.get("temperature")))
    if own is not None:
        return own
    by_name = dict(temperatures)
    return by_name.get("gpu", by_name.get("edge", max(by_name.values(), default=None)))


def _limits(gpu: Mapping[str, Any]) -> tuple[tuple[str, str, float], ...]:
    limits = gpu.get("temp_limits")
    if not isinstance(limits, dict):
        return ()
    return tuple(
        (str(sensor).lower(), limit, celsius) for sensor, entry in limits.items() for limit, celsius in _numbers(entry)
    )


def _numbers(value: object) -> list[tuple[str, float]]:
    """Return the numeric entries of an object; none for anything else."""
    if not isinstance(value, dict):
        return []
    return [(str(key), number) for key, raw in value.items() if (number := _number(raw)) is not None]


def _first(entry: Mapping[str, Any], *keys: str) -> float | None:
    return next((number for key in keys if (number := _number(entry.get(key))) is not None), None)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _positive(value: float | None) -> float | None:
    """Return the value; None for the 0 that stands for a missing sensor."""
    return value if value is not None and value > 0 else None


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _time(value: object) -> float | None:
    """Return the Unix time of a number or of an ISO time, which is local where it names no zone."""
    if isinstance(value, str):
        try:
            return dt.datetime.fromisoformat(value.strip()).timestamp()
        except ValueError:
            pass
    return _number(value)


# ------------------------------------------------------------------------------------------------------------------- CSV


def _csv_rows(path: Path, text: str) -> tuple[list[dict[str, Any]], int, bool]:
    table = list(csv.reader(text.splitlines()))
    header = table[0] if table else []
    if "timestamp" not in header or not any(_GPU_COLUMN.fullmatch(name) for name in header):
        raise _not_a_recording(path)
    rows: list[dict[str, Any]] = []
    dropped = 0
    # A last line without its end may be cut off in the middle of a number: it is ignored.
    repaired = not text.endswith("\n")
    for cells in table[1 : len(table) - repaired]:
        found = _csv_row(header, cells)
        rows += found
        dropped += not found
    return rows, dropped, repaired


def _csv_row(header: list[str], cells: list[str]) -> list[dict[str, Any]]:
    """Parse a line's GPUs; none for an incomplete line."""
    if len(cells) != len(header):
        return []
    line = dict(zip(header, cells, strict=True))
    timestamp = _time(line["timestamp"])
    if timestamp is None:
        return []
    gpus: dict[int, dict[str, str]] = {}
    for name, cell in line.items():
        match = _GPU_COLUMN.fullmatch(name)
        if match:
            gpus.setdefault(int(match[1]), {})[match[2]] = cell
    return [_csv_gpu(timestamp, index, values) for index, values in gpus.items()]


def _csv_gpu(timestamp: float, index: int, values: Mapping[str, str]) -> dict[str, Any]:
    used, clock = _number(values.get("mem_used_mib")), _number(values.get("sm_clock_mhz"))
    celsius = _positive(_number(values.get("temp_c")))
    return {
        "timestamp": timestamp,
        "gpu_index": index,
        "utilization": _share(_number(values.get("util_pct"))),
        "memory_used_bytes": None if used is None else round(used * MIB),
        "power_watts": _positive(_number(values.get("power_w"))),
        "power_limit_watts": _positive(_number(values.get("power_limit_w"))),
        "energy_joules": _number(values.get("energy_j")),
        "temperature_celsius": celsius,
        "temperatures": () if celsius is None else (("gpu", celsius),),
        "clocks": () if clock is None else (("sm", clock * 1e6),),
        "fan": _share(_number(values.get("fan_pct"))),
        "throttle": tuple(reason for reason in values.get("throttle", "").split("|") if reason),
        "fresh": {"1": True, "0": False}.get(values.get("fresh", "")),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSample:
    """One GPU at one moment. `timestamp` is Unix time; `elapsed_seconds` counts from the recording's first row.

    `training` are the run's labels at that time (epoch, batch, phase), if any.
    """

    timestamp: float
    elapsed_seconds: float
    gpu_index: int
    gpu_name: str | None = None
    gpu_uuid: str | None = None
    vendor: str | None = None
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    temperatures: tuple[tuple[str, float], ...] = ()
    temperature_limits: tuple[tuple[str, str, float], ...] = ()
    clocks: tuple[tuple[str, float], ...] = ()
    fan: float | None = None
    throttle: tuple[str, ...] = ()
    fresh: bool | None = None
    training: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A file, or a job's telemetry, read back.

    `dropped` counts invalid entries; `repaired` says that the end was truncated and left out.
    """

    source: Path
    samples: tuple[RecordedSample, ...]
    dropped: int = 0
    repaired: bool = False

    @property
    def by_gpu(self) -> dict[int, tuple[RecordedSample, ...]]:
        """Return the samples of each GPU, by its index, in the order of time."""
        groups: dict[int, list[RecordedSample]] = defaultdict(list)
        for sample in self.samples:
            groups[sample.gpu_index].append(sample)
        return {index: tuple(groups[index]) for index in sorted(groups)}

    @property
    def duration_seconds(self) -> float:
        """Return the time from the first sample to the last: by their times, not by their number."""
        times = [sample.timestamp for sample in self.samples]
        return max(times) - min(times) if times else 0.0
