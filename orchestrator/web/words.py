"""Untrusted text, states and colours for the page. Pure; the input may be anything that a job wrote."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from orchestrator import units

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


def age(seconds: float) -> str:
    """Format a rough duration; below 100 seconds in steps of five, so that little is sent to browsers."""
    return units.age(seconds if seconds >= 100 else seconds // 5 * 5)


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
