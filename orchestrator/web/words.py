"""Formats numbers, times and untrusted text for the page. Pure; the input may be anything that a job wrote."""

from __future__ import annotations

import time
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from orchestrator.figures import figure

if TYPE_CHECKING:
    from collections.abc import Mapping

STATE_SYMBOLS: Final = {
    "PENDING": "◷",
    "STARTING": "◔",
    "RUNNING": "▶",
    "DRAINING": "◕",
    "RECOVERING": "↻",
    "SUSPENDED": "‖",
    "SUCCEEDED": "✓",
    "FAILED": "✕",
    "CANCELLED": "⊘",
    "LOST": "✕",
    "PREEMPTED": "‖",
    "ABORTED": "⊘",
    "READY": "✓",
    "ok": "✓",
    "CORDONED": "⊘",
    "RESERVED": "⊘",
    "QUARANTINED": "✕",
    "UNREACHABLE": "✕",
}
"""Shapes shown beside the word, never instead of it, so that a state is not identified by colour alone."""

LOAD_LEVELS: Final = 8


def clean(value: object) -> str:
    """Return one line without control characters and without characters that change the direction of text."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c in "\n\t\r" else "\N{REPLACEMENT CHARACTER}" for c in text)


class Verbatim(str):
    """A text of several lines that the page shows as it is: escaped, but with its line breaks and tabs."""

    __slots__ = ()


def span(seconds: float | None) -> str:
    """Format a duration in at most two units, as in ``2h08m``; empty for None."""
    if seconds is None or not isfinite(seconds):
        return ""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 172800:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def age(seconds: float) -> str:
    """Format a rough duration in one unit, as in ``5m``: it changes seldom, so that little is sent to browsers."""
    seconds = max(0.0, seconds)
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "m"), (172800, 3600, "h")):
        if seconds < limit:
            whole = int(seconds // unit)
            return f"{whole // 5 * 5}{name}" if name == "s" else f"{whole}{name}"
    return f"{int(seconds // 86400)}d"


def size(count: float | None) -> str:
    """Format a size in powers of 1024; empty for None."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def number(value: float | None) -> str:
    """Format a number with up to four significant digits, or all before the point; empty for None."""
    if value is None:
        return ""
    whole = abs(value) < 1e15 and (abs(value) >= 1000 or value == int(value))
    return f"{value:,.0f}" if whole else figure(value)


def metric(value: float | None, name: str) -> str:
    """Format a metric that a script reports: a size if its name ends with ``_bytes``, else a number; empty for None."""
    return size(value) if name.lower().endswith("_bytes") else number(value)


def percent(ratio: float | None) -> str:
    """Format a ratio in per cent; empty for None."""
    return "" if ratio is None else f"{100 * ratio:.0f}%"


def moment(at: float | None) -> str:
    """Format a time of day on the daemon's machine, with the date unless it is today; empty for None."""
    if at is None or not isfinite(at):
        return ""
    then = time.localtime(at)
    day = "" if then[:3] == time.localtime()[:3] else time.strftime("%Y-%m-%d ", then)
    return day + time.strftime("%H:%M:%S", then)


def stamp(at: float) -> str:
    """Format a time for the ``datetime`` attribute of ``<time>``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def symbol(state: str) -> str:
    """Return the shape beside a state's name."""
    return STATE_SYMBOLS.get(state, "·")


def level(ratio: float | None) -> int | None:
    """Return the step of a ratio on the scale of colours, from 0 to ``LOAD_LEVELS``; None for None."""
    return None if ratio is None else round(min(max(ratio, 0.0), 1.0) * LOAD_LEVELS)


def balance_text(balance: Mapping[str, Any] | None) -> str:
    """Return the balance of a job's GPUs: the band, and the worse of utilization and power; empty without figures."""
    if not balance:
        return ""
    known = balance.get("quantities") or {}
    spreads = {name: known[name]["cv"] for name in ("utilization", "power") if name in known}
    if not spreads:
        return ""
    worst = max(spreads, key=lambda name: float(spreads[name]))
    silent = len(balance.get("silent") or ())
    text = f"{balance.get('band') or ''} ({worst} CV {100 * spreads[worst]:.0f}%)".strip()
    return f"{text}, {silent} silent" if silent else text


def milliseconds(seconds: float | None) -> str:
    """Format a short duration in milliseconds; empty for None."""
    return "" if seconds is None else f"{1000 * seconds:.1f} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
