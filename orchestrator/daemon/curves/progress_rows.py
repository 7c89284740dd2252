"""Parses the lines of a job's ``metrics.jsonl`` into readings by name. Lines not written by orch are skipped."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def time_of(line: bytes) -> float | None:
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
