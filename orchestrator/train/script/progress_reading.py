"""Reads a progress page from a process other than its writer. The content is untrusted.

A script can write any bytes into its page, replace the file, or truncate it. So the page is read with ``pread`` and
never mapped (reading the map of a truncated file kills the reader with SIGBUS), every value is checked for type, range
and finiteness, and an invalid one is left out and named in ``ProgressSnapshot.unusable``.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from array import array
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from orchestrator.core.conformance import is_count, is_finite, is_text, is_time
from orchestrator.spec.plain_files import open_plain
from orchestrator.train.script import progress as layout
from orchestrator.train.script.progress import CheckpointFacts, ProgressPageError, ProgressSnapshot, create_page

if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[[Any], bool]

UNREADABLE: Final = "page"
"""The entry in ``unusable`` for a page that is truncated or damaged as a whole."""
MAX_SECONDS: Final = 1e9
MAX_TEXT: Final = 1000
MAX_QUARANTINED: Final = 3
_NONE: Final = -1
_CLOSED: Final = -1


class PageReader:
    """Reads a page; the rank actor's reader also creates the file and requests a stop."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle
        self._lock = threading.Lock()  # a closed descriptor's number may be reused
        self._last = ProgressSnapshot()

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Self:
        """Create a blank page at ``path`` (normally under /dev/shm), replacing an existing one; mode 0600."""
        target = Path(path)
        return cls(target, create_page(target))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing page to read it. Raises NotPlainFileError for anything but a regular file, and OSError."""
        return cls(path, open_plain(path))

    def close(self) -> None:
        """Close the page; the file stays. ``read`` then returns the last reading."""
        with self._lock:
            if self._handle != _CLOSED:
                os.close(self._handle)
            self._handle = _CLOSED

    def request_stop(self) -> None:
        """Request that the training loop saves and ends; ``should_stop()`` is true from now on. Irrevocable."""
        with self._lock:
            if self._handle != _CLOSED:
                os.pwrite(self._handle, b"\1", layout.STOP_REQUESTED_AT)

    def read(self) -> ProgressSnapshot:
        """Return the newest report; for a damaged page the previous one, marked ``unusable``. Never raises."""
        with self._lock:
            if self._handle != _CLOSED:
                try:
                    self._last = snapshot_of(lambda: os.pread(self._handle, layout.PAGE_BYTES, 0))
                except (ProgressPageError, OSError):
                    self._last = replace(self._last, unusable=(UNREADABLE,))
            return self._last


def snapshot_of(take: Callable[[], bytes]) -> ProgressSnapshot:
    """Read the page through ``take``. Raises ProgressPageError for one that is truncated or damaged as a whole."""
    page = take()
    if len(page) != layout.PAGE_BYTES:
        raise ProgressPageError(f"the progress page has {len(page)} bytes, and not {layout.PAGE_BYTES}")
    pid = layout.WRITER_PID.unpack_from(page, layout.WRITER_PID_AT)[0]
    hot, hot_unusable = _hot(layout.HOT.newest(_whole(take)))
    facts, facts_unusable = _facts(layout.FACTS.newest(_whole(take)))
    return ProgressSnapshot(
        writer_pid=pid if 0 < pid < 2**31 else None,
        checkpoint=facts,
        stop_requested=page[layout.STOP_REQUESTED_AT] != 0,
        stop_seen=page[layout.STOP_SEEN_AT] != 0,
        unusable=(*hot_unusable, *facts_unusable),
        **hot,
    )


def _whole(take: Callable[[], bytes]) -> Callable[[], bytes]:
    """Pad a short read to the page's length: a page truncated during the read counts as damaged."""

    def padded() -> bytes:
        return take().ljust(layout.PAGE_BYTES, b"\0")

    return padded


# -- the report of a step


def _is_optional_count(value: int) -> bool:
    return value == _NONE or is_count(value)


def _is_moment(value: float) -> bool:
    return is_time(value)  # 0 stands for no time yet


def _is_duration(value: float) -> bool:
    return math.isnan(value) or is_finite(value, 0, MAX_SECONDS)


def _is_epoch(value: float) -> bool:
    return math.isnan(value) or is_finite(value)


def _count(value: int) -> int | None:
    return None if value == _NONE else value


def _moment(value: float) -> float | None:
    return value or None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _same(value: int) -> int:
    return value


# In the order of HOT_FIXED: name, check, meaning. The last three are not part of a snapshot.
_HOT_FIELDS: Final[tuple[tuple[str, Check, Callable[[Any], Any]], ...]] = (
    ("step", _is_optional_count, _count),
    ("max_step", _is_optional_count, _count),
    ("total_steps", _is_optional_count, _count),
    ("samples", _is_optional_count, _count),
    ("tokens", _is_optional_count, _count),
    ("new_step", _is_optional_count, _count),
    ("steps_reported", is_count, _same),
    ("recorded", is_count, _same),
    ("metrics_dropped", is_count, _same),
    ("snapshot_step", _is_optional_count, _count),
    ("saves", is_count, _same),
    ("epoch", _is_epoch, _number),
    ("first_step_at", _is_moment, _moment),
    ("new_step_at", _is_moment, _moment),
    ("last_step_at", _is_moment, _moment),
    ("last_report_at", _is_moment, _moment),
    ("step_seconds", _is_duration, _number),
    ("phase_since", _is_moment, _moment),
    ("saving_since", _is_moment, _moment),
    ("snapshot_at", _is_moment, _moment),
    ("save_seconds", _is_duration, _number),
    ("busy_seconds", _is_duration, _number),
)


def _hot(raw: bytes | None) -> tuple[dict[str, Any], list[str]]:
    if raw is None:
        return {}, []
    try:
        packed = layout.HOT_FIXED.unpack_from(raw)
        ring = layout.RECENT.unpack_from(raw, layout.HOT_FIXED.size)
    except struct.error:
        return {}, [UNREADABLE]
    values, unusable = {}, []
    for (name, check, meaning), value in zip(_HOT_FIELDS, packed, strict=False):
        if check(value):
            values[name] = meaning(value)
        else:
            unusable.append(name)
    recent = _ring(ring, values.pop("recorded", 0))
    if not all(is_finite(seconds, 0, MAX_SECONDS) for seconds in recent):
        unusable.append("recent_step_seconds")
        recent = ()
    phase_bytes, count = packed[-2:]
    tail = raw[layout.HOT_FIXED.size + layout.RECENT.size :]
    phase, metrics, wrong = _words(tail, phase_bytes, count)
    return {**values, "recent_step_seconds": recent, "phase": phase, "metrics": metrics}, unusable + wrong


def _ring(values: tuple[float, ...], recorded: int) -> tuple[float, ...]:
    if recorded <= len(values):
        return values[:recorded]
    split = recorded % len(values)
    return values[split:] + values[:split]


def _words(tail: bytes, phase_bytes: int, count: int) -> tuple[str, dict[str, float], list[str]]:
    """Return the phase, the metrics (NaN is valid, as for a diverged loss) and the names of unusable fields."""
    unusable: list[str] = []
    if phase_bytes > layout.MAX_PHASE_BYTES or count > layout.MAX_METRICS or phase_bytes + 9 * count > len(tail):
        return "", {}, ["phase", "metrics"]
    values_at = phase_bytes
    names_at = values_at + 8 * count
    names = _names(tail[names_at:], count)
    metrics = dict(zip(names, array("d", tail[values_at:names_at]), strict=True)) if names is not None else {}
    usable = {name: value for name, value in metrics.items() if name.isprintable() and name}
    if names is None or len(usable) != len(names):
        unusable.append("metrics")
    return tail[:phase_bytes].decode(errors="replace"), usable, unusable


def _names(raw: bytes, count: int) -> tuple[str, ...] | None:
    """Parse the names of the metrics, each after a byte with its length; None where they are invalid."""
    names, at = [], 0
    for _ in range(count):
        length = raw[at] if at < len(raw) else layout.MAX_METRIC_NAME_BYTES + 1
        name = raw[at + 1 : at + 1 + length]
        if length > layout.MAX_METRIC_NAME_BYTES or len(name) != length:
            return None
        names.append(name.decode(errors="replace"))
        at += 1 + length
    return tuple(names)


# -- facts about checkpoints


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_short(value: object) -> bool:
    return is_text(value, MAX_TEXT)


def _are_short(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MAX_QUARANTINED and all(map(_is_short, value))


def _is_length(value: object) -> bool:
    return is_finite(value, 0, MAX_SECONDS)


_BY_TYPE: Final[dict[Any, Check]] = {
    "int": is_count,
    "int | None": _optional(is_count),
    "float": _is_length,
    "float | None": _optional(is_time),
    "str": _is_short,
    "tuple[str, ...]": _are_short,
}
_FACTS: Final = {field.name: _BY_TYPE[field.type] for field in fields(CheckpointFacts)}


def _facts(raw: bytes | None) -> tuple[CheckpointFacts, list[str]]:
    """Parse the facts. Unknown keys are ignored: a newer version may write them."""
    if raw is None:
        return CheckpointFacts(), []
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return CheckpointFacts(), ["checkpoint"]
    known = {name: body[name] for name in _FACTS if name in body}
    unusable = [name for name, value in known.items() if not _FACTS[name](value)]
    usable = {name: _frozen(value) for name, value in known.items() if name not in unusable}
    return CheckpointFacts(**usable), [f"checkpoint.{name}" for name in unusable]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
