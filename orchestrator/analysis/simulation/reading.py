"""Traces as CSV: Philly, Helios, Alibaba PAI. Each row is validated; the first bad one is an error with its line."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil, isfinite
from typing import TYPE_CHECKING, Final

from orchestrator.core.job.record import MAX_WORKERS
from orchestrator.core.simulation import TraceJob

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path


class TraceError(Exception):
    """The trace cannot be used; the message names the file, the line and the value, and ``hint`` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The columns of a published trace. ``users``: the first existing one of these names a job's user."""

    name: str
    at: str
    seconds: str
    gpus: str
    ranks: str = ""
    users: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        """The required columns."""
        return tuple(column for column in (self.at, self.seconds, self.gpus, self.ranks) if column)


FORMATS: Final = (
    Format(name="Philly", at="timestamp", seconds="duration", gpus="num_gpus", users=("user", "cluster")),
    Format(name="Helios", at="submit_time", seconds="duration", gpus="gpu_num", users=("user", "vc")),
    Format(name="Alibaba PAI", at="submit_time", seconds="duration", gpus="num_gpu", ranks="num_inst", users=("user",)),
)


def read_trace(path: Path) -> list[TraceJob]:
    """Return the jobs of a trace that use GPUs, in order of submission. Raises TraceError, and OSError."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            jobs = list(_jobs(str(path), csv.DictReader(file)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise TraceError(f"{path} is not CSV: {error}", "name a CSV file with a line of column names") from error
    if not jobs:
        raise TraceError(f"{path} holds no job that uses a GPU", "name a trace with at least one")
    return sorted(jobs, key=lambda job: job.at)


def _jobs(path: str, rows: csv.DictReader[str]) -> Iterator[TraceJob]:
    known = _format(path, rows.fieldnames or ())
    for row in rows:
        try:
            job = _job(known, row)
        except ValueError as error:
            raise TraceError(f"{path}, line {rows.line_num}: {error}", "fix or remove the line") from error
        if job is not None:
            yield job


def _format(path: str, columns: Iterable[str]) -> Format:
    there = set(columns)
    for known in FORMATS:
        if there.issuperset(known.required):
            return known
    wanted = "; ".join(f"{known.name}: {', '.join(known.required)}" for known in FORMATS)
    raise TraceError(
        f"{path} has the columns {', '.join(sorted(there)) or 'of no header'}", f"one of these is needed: {wanted}"
    )


def _job(known: Format, row: Mapping[str, str | None]) -> TraceJob | None:
    """Return the job of a row; None for one without GPUs."""
    gpus = _number(row, known.gpus, empty=0.0 if known.ranks else None)
    ranks = _number(row, known.ranks, empty=1.0) if known.ranks else 1.0
    if gpus == 0:
        return None
    if gpus != int(gpus) and gpus > 1:
        gpus = float(ceil(gpus))
    if not known.ranks and gpus >= 1:
        ranks, gpus = gpus, 1.0
    if ranks != int(ranks) or not 1 <= ranks <= MAX_WORKERS:
        raise ValueError(f"{known.ranks or known.gpus} is {ranks:g}: a whole number from 1 to {MAX_WORKERS} is needed")
    user = next((value for column in known.users if (value := row.get(column))), "")
    priority = _number(row, "priority", empty=50.0)
    if priority != int(priority) or priority > 100:
        raise ValueError(f"priority is {priority:g}: a whole number from 0 to 100 is needed")
    seconds = max(1.0, _number(row, known.seconds))
    return TraceJob(
        at=_time(row, known.at), seconds=seconds, ranks=int(ranks), gpus=gpus, user=user, priority=int(priority)
    )


def _number(row: Mapping[str, str | None], column: str, *, empty: float | None = None) -> float:
    text = (row.get(column) or "").strip()
    if not text and empty is not None:
        return empty
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value < 0:
        raise ValueError(f"{column} is {text!r}: a number from 0 on is needed")
    return value


def _time(row: Mapping[str, str | None], column: str) -> float:
    """Return seconds since the epoch, or since any other time, which a trace may give as a number."""
    text = (row.get(column) or "").strip()
    try:
        return float(text) if text.replace(".", "", 1).isdigit() else _parsed(text).timestamp()
    except ValueError as error:
        raise ValueError(f"{column} is {text!r}: seconds or a date like 2017-10-09 07:01:55 are needed") from error


def _parsed(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
