"""Progress of a copy of a job's records into one tracker: a small file, replaced atomically and synced.

A point is written here before it is written to the tracker, and removed once the tracker has kept it. After a process was
killed at any moment, the next one therefore finds here what may be missing. The file is in the job's directory, where
the job may write as well: a file that this module would not write counts as an empty journal.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from orchestrator.durable_files import write_whole
from orchestrator.spec.plain_files import read_plain

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VERSION: Final = 1
MOST_BYTES: Final = 64 * 2**20
MOST_TEXT: Final = 1000
MOST_VALUES: Final = 4096
FOLDER: Final = "trackers"
_MOST: Final = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Position for the next reading of one file: the file (``inode``), and the offset of the next line."""

    inode: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The part of a job's records that has become points. ``slots`` are the GPUs' numbers, by their files' names."""

    number: int = 0
    step: int = 0
    began_at: float = 0.0
    last_at: float = 0.0
    window: int = 0
    metrics: Place = Place()
    telemetry: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Values at one time: ``number`` counts a job's points from 0, ``step`` is the newest optimizer step then."""

    number: int
    at: float
    step: int
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """A tracker's state for one job. ``where`` is the run's place for people, ``facts`` for programs, ``problem`` the last error."""

    cursor: Cursor = Cursor()
    pending: tuple[Point, ...] = ()
    points: int = 0
    where: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    finished: bool = False
    updated_at: float = 0.0


def path_of(job: Path, tracker: str) -> Path:
    """Return the path of a tracker's journal in a job's directory."""
    return job / FOLDER / f"{tracker}.json"


def load(path: Path) -> Journal:
    """Return the journal at ``path``; an empty one where there is no valid one."""
    try:
        body = json.loads(read_plain(path, MOST_BYTES))
        if not isinstance(body, dict) or body.get("version") != VERSION:
            return Journal()
        return Journal(
            cursor=_cursor(body["cursor"]),
            pending=tuple(from_json(one) for one in body["pending"]),
            points=_count(body["points"]),
            where=str(body["where"])[:MOST_TEXT],
            facts={str(name)[:MOST_TEXT]: str(value)[:MOST_TEXT] for name, value in body["facts"].items()},
            problem=str(body["problem"])[:MOST_TEXT],
            finished=body["finished"] is True,
            updated_at=_time(body["updated_at"]),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return Journal()


def save(path: Path, journal: Journal) -> Journal:
    """Replace the file, synced, and return the journal as written. Raises OSError."""
    journal = replace(journal, updated_at=round(time.time(), 3))
    body = {
        "version": VERSION,
        "cursor": asdict(journal.cursor),
        "pending": [to_json(point) for point in journal.pending],
        "points": journal.points,
        "where": journal.where[:MOST_TEXT],
        "facts": journal.facts,
        "problem": journal.problem[:MOST_TEXT],
        "finished": journal.finished,
        "updated_at": journal.updated_at,
    }
    write_whole(path, json.dumps(body).encode())
    return journal


def _cursor(body: Any) -> Cursor:
    return Cursor(
        number=_count(body["number"]),
        step=_count(body["step"]),
        began_at=_time(body["began_at"]),
        last_at=_time(body["last_at"]),
        window=_count(body["window"]),
        metrics=Place(inode=_count(body["metrics"]["inode"], 2**64), offset=_count(body["metrics"]["offset"])),
        telemetry={str(name): _count(offset) for name, offset in body["telemetry"].items()},
        slots={str(name): _count(slot) for name, slot in body["slots"].items()},
    )


def _count(value: Any, most: int = _MOST) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("no count")
    return value


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("no time")
    return float(value)


def to_json(point: Point) -> list[Any]:
    """Return a point as the journal keeps it."""
    # JSON has no NaN and no infinity, and a diverged loss is one.
    values = {name: value if math.isfinite(value) else str(value) for name, value in point.values.items()}
    return [point.number, point.at, point.step, values]


def from_json(body: Any) -> Point:
    """Return the point that ``to_json`` wrote. Raises ValueError, TypeError."""
    number, at, step, values = body
    if not (is_whole(number) and is_whole(step) and isinstance(values, dict) and len(values) <= MOST_VALUES):
        raise ValueError("no point")
    if not all(isinstance(name, str) for name in values):
        raise ValueError("no names")
    return Point(number=number, at=float(at), step=step, values={name: float(value) for name, value in values.items()})


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number that a float holds exactly."""
    return type(value) is int and 0 <= value <= 2**53
