"""A job's ``metrics.jsonl``: its reports, one JSON object a line, and the newest one for a restarted daemon.

The file is in the job's directory, where the job may also write. So it is opened only as a regular file and without
waiting, and every line is validated: lines not written by this module are skipped.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from typing import TYPE_CHECKING, Any, Final

from orchestrator.abandoned import stop_if_abandoned
from orchestrator.spec.plain_files import LINK_ON_THE_WAY, is_elsewhere
from orchestrator.train.script.progress import MAX_METRIC_NAME_BYTES, MAX_METRICS, MAX_PHASE_BYTES
from orchestrator.train.script.progress_reading import ProgressSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from orchestrator.core.diagnosis.observation import Pace

TAIL_BYTES: Final = 64 * 1024  # holds several of the longest lines
RECENT_BYTES: Final = 1024 * 1024
MAX_BYTES: Final = 64 * 1024 * 1024  # days of a line a second; then the file replaces metrics.jsonl.1
_MOST: Final = 2**53
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def append(
    path: Path,
    attempt: int,
    highest_step: int,
    snapshot: ProgressSnapshot,
    at: float,
    *,
    ranks: Sequence[Pace] = (),
    most_bytes: int = MAX_BYTES,
) -> None:
    """Add a line of a report made ``at``, with the paces of ``ranks`` if any. Raises OSError; a line that does not fit is not begun.

    A file that would exceed ``most_bytes`` first becomes metrics.jsonl.1, in place of an older one.
    """
    line: dict[str, Any] = {
        "at": round(at, 3),
        "attempt": attempt,
        "step": snapshot.step,
        "max_step": highest_step,
        "total_steps": snapshot.total_steps,
        "epoch": snapshot.epoch,
        "phase": snapshot.phase,
        "samples": snapshot.samples,
        "tokens": snapshot.tokens,
        "step_seconds": snapshot.step_seconds,
        # JSON has no NaN, which a diverged loss is.
        "metrics": {name: value if math.isfinite(value) else None for name, value in snapshot.metrics.items()},
    }
    line |= _paces(ranks)
    if _append(path, (json.dumps(line) + "\n").encode()) > most_bytes:
        path.replace(path.with_name(path.name + ".1"))
        _append(path, (json.dumps(line) + "\n").encode())


def _paces(ranks: Sequence[Pace]) -> dict[str, list[float | None]]:
    """Return seconds per step by rank, from rank 0 on; without the key where none is known."""
    by_rank = {pace.rank: pace for pace in ranks}
    count = max(by_rank, default=-1) + 1
    found: dict[str, list[float | None]] = {}
    for key, attribute in (("rank_step_seconds", "step_seconds"), ("rank_own_seconds", "own_seconds")):
        values = [getattr(by_rank.get(rank), attribute, None) for rank in range(count)]
        if any(value is not None for value in values):
            found[key] = [None if value is None or not math.isfinite(value) else round(value, 6) for value in values]
    return found


def _append(path: Path, data: bytes) -> int:
    """Append whole lines; return the file's new length."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _FLAGS, 0o644)
    try:
        size = _regular_size(handle, path)
        if os.write(handle, data) < len(data):
            os.ftruncate(handle, size)
        return size + len(data)
    finally:
        os.close(handle)


def newest(path: Path) -> tuple[int, int, ProgressSnapshot] | None:
    """Return attempt, highest step and report of the newest valid line; None where there is none."""
    try:
        handle = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:  # missing, or a link
        return None
    try:
        size = _regular_size(handle, path)
        data = os.pread(handle, TAIL_BYTES, max(0, size - TAIL_BYTES))
    except OSError:
        return None
    finally:
        os.close(handle)
    for line in reversed(data.splitlines()):
        found = _parsed(line)
        if found is not None:
            return found
    return None


def recent(path: Path, most_bytes: int = RECENT_BYTES) -> Iterator[tuple[int, ProgressSnapshot]]:
    """Yield attempt and report of each valid line in the last ``most_bytes``, the oldest first; none without a file."""
    try:
        handle = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return
    with os.fdopen(handle, "rb") as file:
        try:
            size = _regular_size(handle, path)
        except OSError:
            return
        if size > most_bytes:
            file.seek(size - most_bytes)
            file.readline(TAIL_BYTES)  # the rest of a line
        while line := file.readline(TAIL_BYTES):
            stop_if_abandoned()
            found = _parsed(line)
            if found is not None:
                yield found[0], found[2]


def values_since(path: Path, name: str, offset: int) -> tuple[list[float], int]:
    """Return a metric's finite values in valid lines from ``offset`` on, and the offset of the next line.

    A file shorter than ``offset`` is a new one, read from its beginning. Raises OSError.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb") as file:
        size = _regular_size(file.fileno(), path)
        offset = offset if offset <= size else 0
        file.seek(offset)
        found: list[float] = []
        while (line := file.readline(TAIL_BYTES)).endswith(b"\n"):
            stop_if_abandoned()
            offset += len(line)
            parsed = _parsed(line)
            value = math.nan if parsed is None else parsed[2].metrics.get(name, math.nan)
            if math.isfinite(value):
                found.append(value)
    return found, offset


def _regular_size(handle: int, path: Path) -> int:
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is not a regular file")
    if is_elsewhere(handle, path):
        raise OSError(errno.ELOOP, LINK_ON_THE_WAY, str(path))
    return found.st_size


def _parsed(line: bytes) -> tuple[int, int, ProgressSnapshot] | None:
    try:
        body = json.loads(line)
        attempt, step = _count(body["attempt"]), _count(body["step"])
        snapshot = ProgressSnapshot(
            step=step,
            max_step=step,
            total_steps=_optional(body["total_steps"]),
            epoch=None if body["epoch"] is None else _finite(body["epoch"]),
            phase=_text(body["phase"], MAX_PHASE_BYTES),
            samples=_optional(body["samples"]),
            tokens=_optional(body["tokens"]),
            step_seconds=None if body["step_seconds"] is None else _finite(body["step_seconds"]),
            metrics=_metrics(body["metrics"]),
            last_report_at=_finite(body["at"]),
        )
        return attempt, max(step, _count(body.get("max_step", step))), snapshot
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError("no count")
    return value


def _optional(value: Any) -> int | None:
    return None if value is None else _count(value)


def _finite(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST or not math.isfinite(value):
        raise ValueError("no finite number from 0 on")
    return float(value)


def _text(value: Any, most: int) -> str:
    if not isinstance(value, str) or len(value.encode(errors="replace")) > most:
        raise ValueError("no short text")
    return value


def _metrics(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > MAX_METRICS:
        raise ValueError("no metrics")
    if any(number is not None and type(number) not in (int, float) for number in value.values()):
        raise ValueError("a metric is not a number")
    # null stands for a value that was not finite: users look for a diverged loss.
    return {
        _text(name, MAX_METRIC_NAME_BYTES): math.nan if number is None else float(number)
        for name, number in value.items()
    }
