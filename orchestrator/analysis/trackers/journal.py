"""Progress of a copy of a job's records into one tracker: a small file, replaced atomically and synced.

A point is written here before it is written to the tracker, and removed once the tracker has kept it. After a process was
killed at any moment, the next one therefore finds here what may be missing. The file is in the job's directory, where
the job may write as well: a file that this module would not write counts as an empty journal, and no link is followed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping  # noqa: TC003  # msgspec reads the annotations
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from orchestrator.durable_files import write_whole
from orchestrator.private_files import enter_below
from orchestrator.spec.plain_files import read_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES: Final = 64 * 2**20
MAX_TEXT: Final = 1000
MAX_VALUES: Final = 4096
FOLDER: Final = "trackers"

Count = Annotated[int, Meta(ge=0, le=2**53)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Position for the next reading of one file: the file (``inode``), and the offset of the next line."""

    inode: Annotated[int, Meta(ge=0)] = 0
    offset: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The part of a job's records that has become points. ``slots`` are the GPUs' numbers, by their files' names."""

    number: Count = 0
    step: Count = 0
    began_at: float = 0.0
    last_at: float = 0.0
    window: Count = 0
    metrics: Place = Place()
    telemetry: dict[str, Count] = field(default_factory=dict)
    slots: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Values at one time: ``number`` counts a job's points from 0, ``step`` is the newest optimizer step then."""

    number: Count
    at: float
    step: Count
    values: Annotated[Mapping[str, float], Meta(max_length=MAX_VALUES)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """A tracker's state for one job. ``where`` is the run's place for people, ``facts`` for programs, ``problem`` the last error."""

    version: Literal[1] = 1
    cursor: Cursor = Cursor()
    pending: tuple[Point, ...] = ()
    points: Count = 0
    where: Text = ""
    facts: dict[str, Text] = field(default_factory=dict)
    problem: Text = ""
    finished: bool = False
    updated_at: float = 0.0


def path_of(job: Path, tracker: str) -> Path:
    """Return the path of a tracker's journal in a job's directory."""
    return job / FOLDER / f"{tracker}.json"


def load(path: Path) -> Journal:
    """Return the journal at ``path``; an empty one where there is no valid one."""
    try:
        # Python's JSON, not msgspec's: it has NaN and infinity, and a diverged loss is one.
        found = msgspec.convert(json.loads(read_plain(path, MAX_BYTES, real=True)), Journal)
    except (OSError, ValueError, RecursionError):  # msgspec's error is a ValueError
        return Journal()
    times = (found.cursor.began_at, found.cursor.last_at, found.updated_at)
    return found if all(map(math.isfinite, times)) else Journal()


def save(path: Path, journal: Journal) -> Journal:
    """Replace the file, synced, and return the journal as written. Raises OSError, and ValueError for a link on the way."""
    journal = replace(
        journal,
        where=journal.where[:MAX_TEXT],
        facts={name: value[:MAX_TEXT] for name, value in journal.facts.items()},
        problem=journal.problem[:MAX_TEXT],
        updated_at=round(time.time(), 3),
    )
    with own_folder(path.parents[1]) as folder:
        write_whole(folder / path.name, json.dumps(asdict(journal)).encode())
    return journal


@contextlib.contextmanager
def own_folder(job: Path, *, make: bool = False) -> Iterator[Path]:
    """Yield the directory of journals in a job's directory, through a descriptor: a later link in its place changes nothing.

    Raises ValueError for a link in place of either directory, FileNotFoundError without them; ``make`` creates the inner one.
    """
    handle = enter_below(job, FOLDER, make=make)
    try:
        yield Path(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number that a float holds exactly."""
    return type(value) is int and 0 <= value <= 2**53
