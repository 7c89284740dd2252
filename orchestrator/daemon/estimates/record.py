"""Keeps ``estimates.jsonl``: estimates at certain shares of each job, and the job's end, to compare them with.

A line is appended at each share and at each end, so that a daemon that is killed loses nothing. The file is small: at
``most_bytes`` it becomes ``estimates.jsonl.1`` in place of an older one.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api.usage_views import EstimateQualityView, EstimateShareView
from orchestrator.core.estimates.time_left import CONFIDENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MOST_BYTES: Final = 1024 * 1024
MOST_LINE_BYTES: Final = 4096
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """Estimate made when ``share`` of the job's steps were done; ``at`` is a Unix time, the others are seconds."""

    job: str
    attempt: int
    at: float
    share: float
    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """End of a job that was estimated, and whether the job succeeded."""

    job: str
    attempt: int
    ended_at: float
    succeeded: bool


class EstimateRecord:
    """Appends and reads lines; from any thread, one at a time."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes

    @classmethod
    def of(cls, home: Path) -> EstimateRecord:
        """Return the record of this home."""
        return cls(home / "estimates.jsonl")

    def add(self, line: Estimated | Ended) -> None:
        """Append a line. Raises OSError; a line that does not fit on the disk is not begun."""
        data = (json.dumps(asdict(line)) + "\n").encode()
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _FLAGS, 0o600)
        try:
            size = os.fstat(handle).st_size
            if os.write(handle, data) < len(data):
                os.ftruncate(handle, size)
        finally:
            os.close(handle)
        if size + len(data) > self._most_bytes:
            self._path.replace(self._older)

    @property
    def _older(self) -> Path:
        return self._path.with_name(f"{self._path.name}.1")

    def lines(self) -> Iterator[Estimated | Ended]:
        """Yield every valid line, the oldest first."""
        for path in (self._older, self._path):
            try:
                handle = os.open(path, os.O_RDONLY | _FLAGS)
            except OSError:
                continue
            with os.fdopen(handle, "rb") as file:
                while line := file.readline(MOST_LINE_BYTES):
                    found = _parsed(line)
                    if found is not None:
                        yield found


def _parsed(line: bytes) -> Estimated | Ended | None:
    try:
        body = json.loads(line)
        if "share" in body:
            numbers = {name: _finite(body[name]) for name in ("at", "share", "seconds", "low", "high")}
            return Estimated(job=str(body["job"]), attempt=int(body["attempt"]), **numbers)
        return Ended(
            job=str(body["job"]),
            attempt=int(body["attempt"]),
            ended_at=_finite(body["ended_at"]),
            succeeded=body["succeeded"] is True,
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None  # a line that a crash cut short


def _finite(value: Any) -> float:
    number = float(value)
    if not 0.0 <= number < 1e15:
        raise ValueError("out of range")
    return number


@dataclass(frozen=True, slots=True)
class _Checked:
    share: float
    within: bool
    error: float


def quality(lines: Iterator[Estimated | Ended] | Sequence[Estimated | Ended]) -> EstimateQualityView:
    """Return how often the interval held the time that a job took, for estimates in the attempt that succeeded. Pure."""
    open_: dict[str, list[Estimated]] = {}
    checked: list[_Checked] = []
    interrupted = jobs = 0
    for line in lines:
        if isinstance(line, Estimated):
            open_.setdefault(line.job, []).append(line)
            continue
        made = open_.pop(line.job, [])
        same = [one for one in made if line.succeeded and one.attempt == line.attempt]
        checked += [_check(one, line) for one in same]
        interrupted += len(made) - len(same)
        jobs += bool(same)
    shares = sorted({one.share for one in checked})
    return EstimateQualityView(
        confidence=CONFIDENCE,
        jobs=jobs,
        checked=len(checked),
        within=sum(one.within for one in checked),
        interrupted=interrupted,
        median_error=median(one.error for one in checked) if checked else None,
        shares=tuple(_share(share, [one for one in checked if one.share == share]) for share in shares),
    )


def _check(made: Estimated, end: Ended) -> _Checked:
    real = max(0.0, end.ended_at - made.at)
    return _Checked(made.share, made.low <= real <= made.high, abs(made.seconds - real) / max(real, 1e-3))


def _share(share: float, found: Sequence[_Checked]) -> EstimateShareView:
    return EstimateShareView(
        share=share,
        checked=len(found),
        within=sum(one.within for one in found),
        median_error=median(one.error for one in found),
    )
