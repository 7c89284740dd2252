"""Reads jobs' records over time: ``metrics.jsonl``, and telemetry in the format of ``gpu/recording/job_record.py``.

Records are append-only, so their lines are in order of time, and a time is found by bisection; a long part is read as evenly spread samples. A job can
write to its records: the function that returns a line's time also validates it, foreign lines are skipped, and reads are bounded.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from orchestrator.gpu.recording.job_record import COLUMNS, row_number, sampled_at
from orchestrator.spec.plain_files import open_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    TimeOf = Callable[[bytes], float | None]
    from collections.abc import Iterable

PROBE_BYTES: Final = 64 * 1024
"""Longest line of a record."""

NEAR_BYTES: Final = 4096
SAMPLES: Final = 256


@dataclass(frozen=True, slots=True)
class Extent:
    """The times of a record's first and last line."""

    begin: float
    end: float


def extent(path: Path, time_of: TimeOf) -> Extent | None:
    """Return the times of a record's first and last line; None without a valid line. Raises OSError."""
    handle = open_plain(path, real=True)
    try:
        size = os.fstat(handle).st_size
        first = _first_time(os.pread(handle, PROBE_BYTES, 0), time_of)
        tail = os.pread(handle, PROBE_BYTES, max(0, size - PROBE_BYTES)).split(b"\n")
        last = next((at for line in reversed(tail) if (at := time_of(line)) is not None), None)
    finally:
        os.close(handle)
    return None if first is None or last is None else Extent(first, max(first, last))


def read_part(
    path: Path, time_of: TimeOf, since: float | None, until: float | None, most_bytes: int
) -> tuple[list[bytes], bool]:
    """Return lines between the two times and a few beside them; and whether they are samples. Raises OSError."""
    handle = open_plain(path, real=True)
    try:
        size = os.fstat(handle).st_size
        begin = 0 if since is None else _place(handle, size, time_of, since)
        end = size if until is None else min(size, _place(handle, size, time_of, until) + NEAR_BYTES)
        if end - begin <= most_bytes:
            return os.pread(handle, max(0, end - begin), begin).split(b"\n"), False
        return _samples(handle, begin, end, most_bytes), True
    finally:
        os.close(handle)


def _samples(handle: int, begin: int, end: int, most_bytes: int) -> list[bytes]:
    """Return whole lines of evenly spread blocks; the last block ends where the part does."""
    lines: list[bytes] = []
    line_bytes = _line_bytes(handle, begin)
    count = max(2, min(SAMPLES, most_bytes // (2 * line_bytes)))
    length = most_bytes // count
    for number in range(count):
        at = begin + (end - begin - length) * number // (count - 1)
        data = os.pread(handle, length, at)
        lines += data.split(b"\n")[1 if at else 0 : -1]
    return lines


def _line_bytes(handle: int, at: int) -> int:
    data = os.pread(handle, PROBE_BYTES, at)
    return max(16, len(data) // max(1, data.count(b"\n")))


def _place(handle: int, size: int, time_of: TimeOf, wanted: float) -> int:
    """Return a position shortly before the first line of that time or a later one."""
    low, high = 0, size
    while high - low > NEAR_BYTES:
        middle = (low + high) // 2
        data = os.pread(handle, PROBE_BYTES, middle)
        at = _first_time(data[data.find(b"\n") + 1 :], time_of)
        if at is not None and at < wanted:
            low = middle
        else:
            high = middle
    # A line that begins before this position may be cut: it is skipped like any incomplete line.
    return low


def _first_time(data: bytes, time_of: TimeOf) -> float | None:
    start = 0
    while start < len(data):
        stop = data.find(b"\n", start)
        stop = len(data) if stop < 0 else stop
        at = time_of(data[start:stop])
        if at is not None:
            return at
        start = stop + 1
    return None


MOST_NAMES: Final = 64
MOST_NAME: Final = 200
MOST_RANKS: Final = 4096
_MOST: Final = 2.0**53


@dataclass(slots=True)
class Readings:
    """Readings over time or steps: metrics by name, the job's step, the ranks' step times, and their own work in those."""

    metrics: dict[str, list[tuple[float, float | None]]] = field(default_factory=dict)
    step_seconds: list[tuple[float, float | None]] = field(default_factory=list)
    rank_step_seconds: dict[int, list[tuple[float, float | None]]] = field(default_factory=dict)
    rank_own_seconds: dict[int, list[tuple[float, float | None]]] = field(default_factory=dict)


def reported_at(line: bytes) -> float | None:
    """Return when a line was written; None for a line that is not orch's."""
    row = parsed(line)
    return None if row is None else row["at"]


def parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a line with a usable time and step."""
    if not line.startswith(b"{"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or _number(row.get("at")) is None or _number(row.get("step")) is None:
        return None
    return row


def readings_of(lines: Iterable[bytes], *, by_step: bool) -> Readings:
    """Return the readings in the lines, by time or by step."""
    rows = [row for line in lines if (row := parsed(line)) is not None]
    key = "step" if by_step else "at"
    found = Readings()
    for row in _kept(rows) if by_step else rows:
        x = float(row[key])
        if (seconds := _number(row.get("step_seconds"))) is not None:
            found.step_seconds.append((x, seconds))
        _add_metrics(found, x, row.get("metrics"))
        _add_ranks(found.rank_step_seconds, x, row.get("rank_step_seconds"))
        _add_ranks(found.rank_own_seconds, x, row.get("rank_own_seconds"))
    return found


def _kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines without steps that a later attempt repeated."""
    kept, least = [], float("inf")
    for row in reversed(rows):
        if row["step"] < least:
            least = row["step"]
            kept.append(row)
    return kept[::-1]


def _add_metrics(found: Readings, x: float, metrics: object) -> None:
    if not isinstance(metrics, dict):
        return
    for name, value in metrics.items():
        if name not in found.metrics and len(found.metrics) >= MOST_NAMES:
            continue
        if value is None or (type(value) in (int, float) and abs(value) <= _MOST):
            found.metrics.setdefault(name[:MOST_NAME], []).append((x, value))


def _add_ranks(found: dict[int, list[tuple[float, float | None]]], x: float, ranks: object) -> None:
    if not isinstance(ranks, list):
        return
    for rank, value in enumerate(ranks[:MOST_RANKS]):
        if (seconds := _number(value)) is not None:
            found.setdefault(rank, []).append((x, seconds))


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return float(value) if 0 <= value <= _MOST else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A column, the name and unit to show, and the factor to that unit."""

    name: str
    column: int
    unit: str
    factor: float


QUANTITIES: Final = (
    Quantity(name="GPU load", column=COLUMNS.index("utilization"), unit="%", factor=100.0),
    Quantity(name="GPU memory", column=COLUMNS.index("memory_used_bytes"), unit="GiB", factor=1 / 2**30),
    Quantity(name="GPU power", column=COLUMNS.index("power_watts"), unit="W", factor=1.0),
    Quantity(name="GPU temperature", column=COLUMNS.index("temperature_celsius"), unit="°C", factor=1.0),
)


@dataclass(slots=True)
class GpuReadings:
    """One GPU's readings by the quantity's name."""

    uuid: str
    index: int
    values: dict[str, list[tuple[float, float | None]]] = field(default_factory=dict)


def add_rows(found: GpuReadings, lines: Iterable[bytes]) -> None:
    """Add the values in the rows; unmeasured values are left out."""
    columns = [(one.column, one.factor, found.values.setdefault(one.name, [])) for one in QUANTITIES]
    for line in lines:
        at, cells = sampled_at(line), line.split(b",")
        if at is None:
            continue
        for column, factor, values in columns:
            if (value := row_number(cells[column])) is not None:
                values.append((at, value * factor))
