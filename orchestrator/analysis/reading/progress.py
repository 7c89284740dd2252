"""Reads a job's progress over time from its ``metrics.jsonl``: lines written by orch; others are skipped.

The job can also write to its directory: every value is validated, and the size is limited.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orchestrator.analysis.reading.series import Floats, Progress
from orchestrator.analysis.reading.telemetry import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

MOST_METRICS: Final = 256
MOST_LINE_CHARACTERS: Final = 64 * 1024
MOST_LINES: Final = 2_000_000
_MOST: Final = 2.0**53


def read_progress(path: Path) -> Progress | None:
    """Return the progress in ``metrics.jsonl`` at ``path`` (and the older ``.1`` beside it); None where there is none."""
    rows: list[Mapping[str, Any]] = []
    for file in (path.with_name(f"{path.name}.1"), path):
        try:
            rows += _rows(file)
        except OSError:
            continue
    return progress_of(rows)


def _rows(path: Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    with open_regular(path) as file:
        while len(rows) < MOST_LINES and (line := file.readline(MOST_LINE_CHARACTERS)):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows


def progress_of(rows: Iterable[Mapping[str, Any]]) -> Progress | None:
    """Return progress from rows with ``at``, ``step`` and other keys of ``metrics.jsonl``; None when no row is valid."""
    usable = [row for row in rows if not math.isnan(number(row.get("at"))) and not math.isnan(number(row.get("step")))]
    if not usable:
        return None
    usable.sort(key=lambda row: number(row["at"]))
    totals = [total for row in usable if (total := row.get("total_steps")) and not math.isnan(number(total))]
    return Progress(
        times=_column(usable, "at"),
        attempts=_column(usable, "attempt"),
        steps=_column(usable, "step"),
        samples=_column(usable, "samples"),
        tokens=_column(usable, "tokens"),
        step_seconds=_column(usable, "step_seconds"),
        epochs=_column(usable, "epoch"),
        phases=tuple(phase if isinstance(phase := row.get("phase"), str) else "" for row in usable),
        metrics=_metrics([row.get("metrics") for row in usable]),
        total_steps=int(totals[-1]) if totals else None,
    )


def number(value: object, least: float = 0.0) -> float:
    """Return a finite number from ``least`` on; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if least <= value <= _MOST else math.nan


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> Floats:
    return np.array([number(row.get(key)) for row in rows])


def _metrics(reported: Sequence[object]) -> dict[str, Floats]:
    columns: dict[str, Floats] = {}
    for place, metrics in enumerate(reported):
        if not isinstance(metrics, dict):
            continue
        for name, value in metrics.items():
            if name not in columns:
                if len(columns) >= MOST_METRICS:
                    continue
                columns[name] = np.full(len(reported), np.nan)
            columns[name][place] = number(value, least=-_MOST)
    return columns
