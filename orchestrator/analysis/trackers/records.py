"""Reads the new part of a job's records, and makes points of it: metrics as reported, GPUs as means over ten seconds.

Each call reads a bounded part. Only complete lines are read; lines that orch does not write are skipped.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Final

from orchestrator.analysis.runs import is_sample, report_of, sample_numbers, valid_number
from orchestrator.analysis.trackers.journal import MAX_VALUES, Cursor, Place, Point, is_whole
from orchestrator.gpu.load import GpuLoad, Quantity, balance
from orchestrator.gpu.recording.job_record import COLUMNS
from orchestrator.spec.plain_files import open_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

WINDOW_SECONDS: Final = 10.0
SETTLE_SECONDS: Final = 5.0
"""Time from the end of a window until it is reported: exporters write within a second, and clocks of nodes differ."""
MAX_BYTES: Final = 2**20
MAX_LINES: Final = 200
MAX_GPUS: Final = 1024
_CELLS: Final = tuple(
    COLUMNS.index(name) for name in ("utilization", "memory_used_bytes", "power_watts", "temperature_celsius")
)


MIB: Final = 2**20
CV_NAMES: Final = {
    Quantity.UTILIZATION: "gpu_load_balance_cv",
    Quantity.MEMORY: "gpu_memory_balance_cv",
    Quantity.POWER: "gpu_power_balance_cv",
}


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


@dataclass(slots=True)
class _Part:
    """New samples of one GPU: its windows, and the offset of each one's end in the file."""

    windows: dict[int, GpuWindow] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    unread_from: float = math.inf


def read_on(
    job: Path, cursor: Cursor, now: float, *, window_seconds: float = WINDOW_SECONDS
) -> tuple[list[Point], Cursor]:
    """Return the points after a cursor, and the cursor after them. With an infinite ``now`` nothing is held back."""
    found, cursor = _reported(job, cursor)
    gpus, cursor = _sampled(job / "telemetry", cursor, now - SETTLE_SECONDS, window_seconds)
    points: list[Point] = []
    step, began = cursor.step, cursor.began_at
    for at, own_step, values in sorted((*found, *gpus), key=lambda entry: entry[0]):
        step = step if own_step is None else own_step
        began = began or at
        values["elapsed_seconds"] = max(0.0, at - began)
        points.append(Point(number=cursor.number + len(points), at=at, step=step, values=values))
    return points, replace(cursor, number=cursor.number + len(points), step=step, began_at=began)


_Entry = tuple[float, int | None, dict[str, float]]


def _reported(job: Path, cursor: Cursor) -> tuple[list[_Entry], Cursor]:
    """Return the new lines of ``metrics.jsonl``, and before them the rest of the file that it has replaced."""
    current, rotated = job / "metrics.jsonl", job / "metrics.jsonl.1"
    inodes = {path: _inode(path) for path in (rotated, current)}
    place = cursor.metrics
    if place.inode == inodes[current] != 0:
        order = [(current, place.offset)]
    elif place.inode == inodes[rotated] != 0:
        order = [(rotated, place.offset), (current, 0)]
    else:
        order = [(rotated, 0), (current, 0)]
    # A file that was copied to another disk has another inode, but its lines keep their times.
    known_until = -math.inf if place.inode in inodes.values() else cursor.last_at
    found: list[_Entry] = []
    last_at = cursor.last_at
    for path, start in order:
        if not inodes[path]:
            continue
        offset = start
        for line, end in _lines(path, start):
            if len(found) == MAX_LINES:
                return found, replace(cursor, metrics=place, last_at=last_at)
            offset = end
            place = Place(inode=inodes[path], offset=offset)
            entry = parse_line(line)
            if entry is not None and entry[0] > known_until:
                found.append(entry)
                last_at = max(last_at, entry[0])
        place = Place(inode=inodes[path], offset=offset)
        if path == rotated and offset < _size(path):
            break
    return found, replace(cursor, metrics=place, last_at=last_at)


def _sampled(folder: Path, cursor: Cursor, until: float, seconds: float) -> tuple[list[_Entry], Cursor]:
    """Return the windows that are over, each as one entry."""
    parts = {name: _part(folder / name, cursor.telemetry.get(name, 0), seconds) for name in _telemetry(folder)}
    until = min([until, *(part.unread_from for part in parts.values())])
    over = sorted(
        {w for part in parts.values() for w in part.windows if w > cursor.window and (w + 1) * seconds <= until}
    )
    over = over[:MAX_LINES]
    slots, offsets = dict(cursor.slots), dict(cursor.telemetry)
    found: list[_Entry] = []
    for window in over:
        active = {name: part.windows[window] for name, part in parts.items() if window in part.windows}
        slots = assign(slots, active)
        values = gpu_values(sorted(((slots[name], one) for name, one in active.items()), key=lambda pair: pair[0]))
        found.append(((window + 1) * seconds, None, values))
    done = over[-1] if over else cursor.window
    for name, part in parts.items():
        ends = [end for window, end in part.ends.items() if window <= done]
        offsets[name] = max([offsets.get(name, 0), *ends])
    return found, replace(cursor, window=done, telemetry=offsets, slots=slots)


def assign(slots: Mapping[str, int], active: Mapping[str, object]) -> dict[str, int]:
    """Return the numbers of a job's GPUs: a GPU keeps its number, and one that takes another's place takes its number.

    The GPUs of the second attempt therefore continue the curves of those of the first.
    """
    kept = {name: slots[name] for name in active if name in slots}
    free = (number for number in range(len(active) + len(kept) + 1) if number not in kept.values())
    fresh = {name: next(free) for name in sorted(active) if name not in kept}
    held = {*kept.values(), *fresh.values()}
    silent = {name: number for name, number in slots.items() if name not in active and number not in held}
    return silent | kept | fresh


def _part(path: Path, start: int, seconds: float) -> _Part:
    part = _Part()
    lines = [(line.decode(errors="replace"), end) for line, end in _lines(path, start)]
    rows = [(line, end) for line, end in lines if is_sample(line)]
    last = 0.0
    for (_, end), numbers in zip(rows, sample_numbers([line for line, _ in rows]).tolist(), strict=True):
        at = numbers[0]
        if not at >= 0:  # NaN neither
            continue
        last, number = at, int(at // seconds)
        window = part.windows.setdefault(number, GpuWindow())
        for column, values in zip(
            _CELLS, (window.utilization, window.memory_bytes, window.watts, window.celsius), strict=True
        ):
            if not math.isnan(numbers[column]):
                values.append(numbers[column])
        part.ends[number] = max(end, part.ends.get(number, 0))
    if lines and lines[-1][1] - start > MAX_BYTES - 4096:  # there is more, and the last window may continue in it
        part.unread_from = last
    return part


def parse_line(line: bytes) -> tuple[float, int | None, dict[str, float]] | None:
    """Return time, step and values of a line of ``metrics.jsonl``; None for a line that orch does not write."""
    body = report_of(line) or {}
    at, step, metrics = valid_number(body.get("at")), body.get("step"), body.get("metrics")
    if math.isnan(at) or "step" not in body or not (step is None or is_whole(step)) or not isinstance(metrics, dict):
        return None
    if len(metrics) > MAX_VALUES:
        return None
    try:
        values = {
            name: math.nan if value is None else float(value)
            for name, value in metrics.items()
            if value is None or type(value) in (int, float)
        }
    except OverflowError:
        return None
    for name in ("epoch", "samples", "tokens", "step_seconds", "attempt"):
        if not math.isnan(value := valid_number(body.get(name))):
            values.setdefault(name, value)
    return at, step, values


def _lines(path: Path, start: int) -> Iterator[tuple[bytes, int]]:
    """Yield complete lines from an offset on, with the offset after each; a bounded part of them."""
    try:
        handle = open_plain(path, real=True)
    except OSError:
        return
    try:
        size = os.fstat(handle).st_size
        offset = start if start <= size else 0  # another file
        data = os.pread(handle, MAX_BYTES, offset)
    except OSError:
        return
    finally:
        os.close(handle)
    if b"\n" not in data and len(data) == MAX_BYTES:  # not a line of orch: skipped
        yield b"", offset + len(data)
        return
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        offset += len(line)
        yield line[:-1], offset


def _telemetry(folder: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
    return [name for name in names if name.startswith("telemetry-") and name.endswith(".csv")][:MAX_GPUS]


def _inode(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_ino
    except OSError:
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
