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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from msgspec import Meta, field
from msgspec.structs import replace

from orchestrator.core.codec import Count, Message, Number, Seconds, Time, usable
from orchestrator.spec.plain_files import open_plain
from orchestrator.train.script import progress as layout
from orchestrator.train.script.progress import ProgressPageError, create_page

if TYPE_CHECKING:
    from collections.abc import Callable

UNREADABLE: Final = "page"
"""The entry in ``unusable`` for a page that is truncated or damaged as a whole."""
MAX_QUARANTINED: Final = 3
ShortText = Annotated[str, Meta(max_length=1000)]
_NONE: Final = -1
_CLOSED: Final = -1


class CheckpointFacts(Message):
    """The rank's facts about its checkpoints on storage. Times are seconds since the epoch; None means not yet.

    Under orch the rank only takes snapshots in memory, and its rank actor has the state on storage.
    """

    saved_step: Count | None = None
    saved_at: Time | None = None
    saved_path: ShortText = ""
    saved_bytes: Count = 0
    failed_saves: Count = 0
    failure: ShortText = ""
    failure_kind: ShortText = ""  # equal for all failures with one cause
    failed_at: Time | None = None
    resumed_step: Count | None = None
    resumed_path: ShortText = ""
    resumed_seconds: Seconds = 0.0
    quarantined: Annotated[tuple[ShortText, ...], Meta(max_length=MAX_QUARANTINED)] = ()
    interval_steps: Count | None = None
    interval_reason: ShortText = ""
    snapshot_bytes: Count = 0  # memory of all slots of the rank
    snapshots_off: ShortText = ""  # why the newest save went to storage directly
    waits: Count = 0  # saves that waited for storage to take an earlier one
    waited_seconds: Seconds = 0.0
    left_out: Count = 0  # saves that should have reached storage and were dropped because it failed
    left_out_step: Count | None = None  # the newest of them


class ProgressSnapshot(Message):
    """One consistent reading of a progress page.

    Wall times (``*_at``, ``*_since``) are seconds since the epoch, None until the thing has happened. ``step`` is the
    step reported last, ``max_step`` the highest one. ``new_step`` and ``new_step_at`` are of the first reported step
    above the one given as ORCH_PREVIOUS_STEP; ``last_step_at`` is when ``max_step`` last rose, ``last_report_at`` when
    anything was reported. ``step_seconds`` is a running mean; ``recent_step_seconds`` holds up to
    32 durations, oldest first. ``busy_seconds`` is a running mean, too: the processor time of a step in the thread that
    reports it. ``saving_since`` is set while a save to storage stalls the training loop.
    ``snapshot_step`` is the newest one in shared memory; ``save_seconds`` is how long the last save, of either kind,
    stalled the loop; ``saves`` counts both. ``unusable`` names the values that were on the page and are left out, because
    they have the wrong type, are not finite, or are out of range. ``guessed``: the script reports nothing, and its steps were
    recognised in what it prints.
    """

    writer_pid: Count | None = None
    step: Count | None = None
    max_step: Count | None = None
    total_steps: Count | None = None
    epoch: Number | None = None
    phase: ShortText = ""
    phase_since: Time | None = None
    samples: Count | None = None
    tokens: Count | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_dropped: Count = 0
    first_step_at: Time | None = None
    new_step: Count | None = None
    new_step_at: Time | None = None
    last_step_at: Time | None = None
    last_report_at: Time | None = None
    steps_reported: Count = 0
    step_seconds: Seconds | None = None
    busy_seconds: Seconds | None = None
    recent_step_seconds: Annotated[tuple[Seconds, ...], Meta(max_length=layout.RECENT_STEPS)] = ()
    saving_since: Time | None = None
    snapshot_step: Count | None = None
    snapshot_at: Time | None = None
    save_seconds: Seconds | None = None
    saves: Count = 0
    checkpoint: CheckpointFacts = CheckpointFacts()
    stop_requested: bool = False
    stop_seen: bool = False
    unusable: tuple[ShortText, ...] = ()
    guessed: bool = False


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
    hot, wrong = _hot(layout.HOT.newest(_whole(take)))
    facts, facts_wrong = _facts(layout.FACTS.newest(_whole(take)))
    snapshot, _ = usable(ProgressSnapshot, hot | facts)
    return replace(
        snapshot,
        writer_pid=pid if 0 < pid < 2**31 else None,
        stop_requested=page[layout.STOP_REQUESTED_AT] != 0,
        stop_seen=page[layout.STOP_SEEN_AT] != 0,
        unusable=(*wrong, *facts_wrong, *snapshot.unusable),
    )


def _whole(take: Callable[[], bytes]) -> Callable[[], bytes]:
    """Pad a short read to the page's length: a page truncated during the read counts as damaged."""

    def padded() -> bytes:
        return take().ljust(layout.PAGE_BYTES, b"\0")

    return padded


# -- the report of a step

# In the order of HOT_FIXED. "recorded" counts the durations in the ring, and is not part of a snapshot.
_COUNTS: Final = (
    *("step", "max_step", "total_steps", "samples", "tokens", "new_step", "steps_reported", "recorded"),
    *("metrics_dropped", "snapshot_step", "saves"),
)
_NUMBERS: Final = (
    *("epoch", "first_step_at", "new_step_at", "last_step_at", "last_report_at", "step_seconds", "phase_since"),
    *("saving_since", "snapshot_at", "save_seconds", "busy_seconds"),
)


def _hot(raw: bytes | None) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a report by name, unchecked, and the names of those that have no form."""
    if raw is None:
        return {}, []
    try:
        packed = layout.HOT_FIXED.unpack_from(raw)
        ring = layout.RECENT.unpack_from(raw, layout.HOT_FIXED.size)
    except struct.error:
        return {}, [UNREADABLE]
    counts = dict(zip(_COUNTS, packed, strict=False))
    numbers = dict(zip(_NUMBERS, packed[len(_COUNTS) :], strict=False))
    recent = _ring(ring, max(0, counts.pop("recorded")))
    # What the writer has not set: a count of -1, a time of 0, any other number that is NaN.
    known: dict[str, Any] = {name: value for name, value in counts.items() if value != _NONE}
    known |= {n: v for n, v in numbers.items() if not (math.isnan(v) or (v == 0 and n.endswith(("_at", "_since"))))}
    phase_bytes, count = packed[-2:]
    tail = raw[layout.HOT_FIXED.size + layout.RECENT.size :]
    phase, metrics, wrong = _words(tail, phase_bytes, count)
    return {**known, "recent_step_seconds": recent, "phase": phase, "metrics": metrics}, wrong


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


def _facts(raw: bytes | None) -> tuple[dict[str, Any], list[str]]:
    """Return the facts, unchecked."""
    if raw is None:
        return {}, []
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    return ({"checkpoint": body}, []) if isinstance(body, dict) else ({}, ["checkpoint"])
