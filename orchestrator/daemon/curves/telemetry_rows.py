"""Parses the lines of a GPU's telemetry of a job; the format is ``gpu/recording/job_record.py``'s."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.recording.job_record import COLUMNS
from orchestrator.spec.plain_files import read_plain

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

IDENTITY_BYTES: Final = 64 * 1024
PREFIX: Final = "telemetry-"


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


def time_of(line: bytes) -> float | None:
    """Return when a row was sampled; None for a header or an incomplete row."""
    if line.count(b",") != len(COLUMNS) - 1:
        return None
    return _float(line[: line.find(b",")])


def add_rows(found: GpuReadings, lines: Iterable[bytes]) -> None:
    """Add the values in the rows; unmeasured values are left out."""
    columns = [(one.column, one.factor, found.values.setdefault(one.name, [])) for one in QUANTITIES]
    for line in lines:
        cells = line.split(b",")
        if len(cells) != len(COLUMNS) or (at := _float(cells[0])) is None:
            continue
        for column, factor, values in columns:
            if cells[column] and (value := _float(cells[column])) is not None:
                values.append((at, value * factor))


def identity(path: Path) -> tuple[str, int]:
    """Return the UUID and the index of the GPU of the rows at ``path``."""
    stem = path.name.removeprefix(PREFIX).removesuffix(".csv")
    try:
        body = json.loads(read_plain(path.with_suffix(".json"), IDENTITY_BYTES))
    except (OSError, ValueError, RecursionError):
        return stem, 0
    if not isinstance(body, dict):
        return stem, 0
    uuid, index = body.get("uuid"), body.get("index")
    return (
        uuid[:200] if isinstance(uuid, str) else stem,
        index if type(index) is int and 0 <= index < 2**16 else 0,
    )


def _float(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None
