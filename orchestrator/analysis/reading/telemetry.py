"""Reads a job's telemetry in columns: a day of eight GPUs is 690,000 rows, too many for an object each.

The format is ``gpu/recording/job_record.py``'s. Rows truncated by a crash, and headers between rows, are skipped.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orchestrator.abandoned import stop_if_abandoned
from orchestrator.analysis.reading.series import Floats, GpuSeries, Quantity
from orchestrator.gpu.recording.job_record import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

IDENTITY_BYTES: Final = 64 * 1024
BLOCK_ROWS: Final = 50_000
_NUMBERS: Final = (0, 1, 2, 3, 4, 5, 6)
_AFTER_THROTTLE: Final = len(COLUMNS) - COLUMNS.index("throttle")
"""Number of splits from a row's end after which the throttle reasons are in the second place."""
_COMMAS: Final = len(COLUMNS) - 1
_HEADER: Final = f"{COLUMNS[0]},"
_COLUMN_OF: Final = {
    Quantity.UTILIZATION: COLUMNS.index("utilization"),
    Quantity.MEMORY: COLUMNS.index("memory_used_bytes"),
    Quantity.POWER: COLUMNS.index("power_watts"),
    Quantity.TEMPERATURE: COLUMNS.index("temperature_celsius"),
    Quantity.CLOCK: COLUMNS.index("sm_clock_hertz"),
}


@dataclass(frozen=True, slots=True)
class _Rows:
    """The numbers of complete rows, how many were throttled, and how many rows were incomplete."""

    numbers: Floats
    throttled: int
    dropped: int


def read_telemetry(directory: Path) -> tuple[tuple[GpuSeries, ...], int]:
    """Return the GPUs of a job's telemetry, and the number of incomplete rows. Raises OSError for an unreadable file."""
    found = []
    dropped = 0
    for path in sorted(directory.glob("telemetry-*.csv")):
        rows = _read(path)
        dropped += rows.dropped
        if len(rows.numbers):
            found.append((_identity(path), rows))
    indices = [_index(identity) for identity, _ in found]
    gpus = [
        _series(identity, rows, shared=indices.count(_index(identity)) > 1)
        for identity, rows in sorted(found, key=lambda one: (_index(one[0]), str(one[0].get("uuid"))))
    ]
    return tuple(gpus), dropped


def _read(path: Path) -> _Rows:
    blocks: list[Floats] = []
    throttled = dropped = 0
    with open_regular(path) as file:
        while lines := list(islice(file, BLOCK_ROWS)):
            stop_if_abandoned()
            whole = [line for line in lines if line.count(",") == _COMMAS and not line.startswith(_HEADER)]
            headers = sum(line.startswith(_HEADER) or line.isspace() for line in lines)
            numbers = _numbers(whole)
            usable = np.isfinite(numbers[:, 0])
            blocks.append(numbers[usable])
            dropped += len(lines) - headers - int(usable.sum())
            throttled += sum(bool(line.rsplit(",", _AFTER_THROTTLE)[1]) for line in whole)
    numbers = np.concatenate(blocks) if blocks else np.empty((0, len(_NUMBERS)))
    return _Rows(numbers[np.argsort(numbers[:, 0], kind="stable")], throttled, dropped)


def _numbers(lines: Sequence[str]) -> Floats:
    """Return the numeric columns of complete rows; NaN for an invalid number."""
    if not lines:
        return np.empty((0, len(_NUMBERS)))
    table = _parsed(lines)
    if table is None:  # empty cells: a GPU lacks the quantity
        table = _parsed([line.replace(",,", ",nan,").replace(",,", ",nan,") for line in lines])
    if table is None:
        rows = [line.split(",", len(_NUMBERS)) for line in lines]
        table = np.array([[number_of(cell) for cell in row[: len(_NUMBERS)]] for row in rows])
    table[~np.isfinite(table)] = np.nan
    return table


def _parsed(lines: Sequence[str]) -> Floats | None:
    """Return the numeric columns; None where a cell is no number."""
    try:
        return np.loadtxt(lines, delimiter=",", usecols=_NUMBERS, comments=None, ndmin=2)
    except ValueError:
        return None


def number_of(text: str) -> float:
    """Return the number in a cell, NaN for anything else."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def open_regular(path: Path) -> Any:
    """Open a text file for reading if it is a regular one: a job can put a FIFO or a link in its place."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(handle, encoding="utf-8", errors="replace", newline="\n")


def _identity(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path.with_suffix(".json")) as file:
            document = json.loads(file.read(IDENTITY_BYTES))
    except (OSError, ValueError, RecursionError):
        return {"uuid": path.stem.removeprefix("telemetry-")}
    return document if isinstance(document, dict) else {}


def _index(identity: dict[str, Any]) -> int:
    index = identity.get("index")
    return index if isinstance(index, int) and 0 <= index < 2**16 else 0


def _text(value: object) -> str:
    return value[:200] if isinstance(value, str) else ""


def _series(identity: dict[str, Any], rows: _Rows, *, shared: bool) -> GpuSeries:
    index, uuid, total = _index(identity), _text(identity.get("uuid")), identity.get("memory_total_bytes")
    return GpuSeries(
        label=gpu_label(index, uuid, shared=shared),
        index=index,
        model=_text(identity.get("model")),
        uuid=uuid,
        vendor=_text(identity.get("vendor")),
        times=rows.numbers[:, 0],
        values={quantity: rows.numbers[:, column] for quantity, column in _COLUMN_OF.items()},
        energy_joules=rows.numbers[:, COLUMNS.index("energy_joules")],
        memory_total_bytes=float(total) if isinstance(total, int) and 0 < total < 2**60 else None,
        throttled=rows.throttled,
    )


def gpu_label(index: int, uuid: str, *, shared: bool) -> str:
    """Return a GPU's label; ``shared``: another of the run's GPUs has its index."""
    return f"GPU {index} ({uuid.removeprefix('GPU-')[:13]})" if shared and uuid else f"GPU {index}"
