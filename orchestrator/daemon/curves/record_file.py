"""Reads the part of a record between two times, or evenly spread samples of a long part.

Records are append-only, so their lines are in order of time, and a time is found by bisection. A job can write to its
records: the function that returns a line's time also validates it, and reads are bounded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.spec.plain_files import open_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    TimeOf = Callable[[bytes], float | None]

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
    handle = open_plain(path)
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
    handle = open_plain(path)
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
