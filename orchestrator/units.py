"""Formats numbers, sizes, durations and times: the one form of each for the terminal, the page, sentences and reports.

Nothing is grouped by thousands: what is shown can be searched for, and read by programs. None is an empty text
everywhere. Imports nothing slow: every command line loads it. What job.yaml accepts and writes back exactly is
``spec.units``.
"""

from __future__ import annotations

import time
from math import isfinite, isnan
from typing import Any


def number(value: float | None, digits: int = 4, sign: str = "") -> str:
    """Format a number with ``digits`` significant digits, or with all those before the point: ``0.52``, ``12345``, ``2``.

    Only numbers below 0.0001 and above 10^15 have an exponent.
    """
    if value is None:
        return ""
    if 10 ** (digits - 1) <= abs(value) < 1e15:
        return f"{value:{sign}.0f}"
    return f"{value:{sign}.{digits}g}"


def plural(count: float, one: str, many: str = "") -> str:
    """Return text such as ``1 GPU``, ``2 GPUs``, ``0.5 GPUs``."""
    return f"{number(count)} {one if count == 1 else many or one + 's'}"


def spreadsheet(value: Any) -> Any:
    """Return a value for a CSV file; a text that a spreadsheet would take for a formula is quoted."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def percent(ratio: float | None) -> str:
    """Format a ratio in per cent, as in ``42%``."""
    return "" if ratio is None else f"{100 * ratio:.0f}%"


def size(count: float | None) -> str:
    """Format a size in powers of 1024, as in ``1.5 GiB``."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def metric(name: str, value: float | None) -> str:
    """Format a metric that a script reports: a size if its name ends with ``_bytes``, else a number; ``nan`` for None."""
    if value is None or not isfinite(value):
        return "nan" if value is None or isnan(value) else str(value)
    return size(value) if name.lower().endswith("_bytes") else number(value)


def duration(seconds: float | None) -> str:
    """Format a duration in at most two units, as in ``1m20s`` and ``10m``: milliseconds below one second, a decimal below ten."""
    if seconds is None or not isfinite(seconds):
        return ""
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{number(1000 * seconds, 3)}ms" if seconds else "0s"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s".removesuffix("00s")
    if whole < 172800:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m".removesuffix("00m")
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h".removesuffix("00h")


def elapsed(seconds: float, *, tenths: bool = False) -> str:
    """Format a duration as players and process lists show it, as in ``1:02:03`` and ``0:00:07.5``."""
    minutes, rest = divmod(seconds if tenths else int(seconds), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02d}:{rest:04.1f}" if tenths else f"{hours}:{minutes:02d}:{rest:02d}"


def age(seconds: float) -> str:
    """Format a rough duration in one unit, as in ``5m``: 0s to 99s, then minutes, hours, days."""
    seconds = max(0.0, seconds)
    for limit, scale, unit in ((100, 1, "s"), (5940, 60, "m"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds // scale)}{unit}"
    return f"{int(seconds // 86400)}d"


def clock(at: float | None, *, seconds: bool = True, fraction: bool = False) -> str:
    """Format a time of day on this machine, with the date unless it is today; ``fraction``: in milliseconds."""
    if at is None or not isfinite(at):
        return ""
    then = time.localtime(at)
    day = "" if then[:3] == time.localtime()[:3] else time.strftime("%Y-%m-%d ", then)
    text = day + time.strftime("%H:%M:%S" if seconds else "%H:%M", then)
    return f"{text}.{int(at % 1 * 1000):03d}" if fraction else text
