"""The progress page: 16 KiB of shared memory through which a training process reports to its rank actor.

The rank process writes (``ProgressPage``), the rank actor reads (``progress_reading.py``); only the request to stop flows back. A report
costs a few microseconds and one short system call, may be made every millisecond, and the latest one counts. Standard library only: the
training process and the rank actor import this, and both must start fast.

Must not: block training, allocate without bound, or ever show a half-written record. A record (``Slots``) has two slots. The writer fills
the older slot and never touches the newer one, so a process that is killed in the middle of a write leaves the previous record intact.
Each slot has a counter and a CRC that covers both counter and payload: a reader takes the valid slot with the higher counter, and a record
that changed during the read fails its CRC and is read again. That holds on any memory model, which a plain sequence lock in Python could
not guarantee.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import threading
import time
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PAGE_BYTES = 16 * 1024
MAGIC = b"ORCHPAGE"
LAYOUT_VERSION = 2

HEADER = struct.Struct("<8sII")  # magic, layout version, page size
WRITER_PID = struct.Struct("<Q")
WRITER_PID_AT = 16
STOP_REQUESTED_AT = 64  # one byte each, on separate cache lines: the actor's and the rank's
STOP_SEEN_AT = 128
STOP_SEEN_TIME = struct.Struct("<d")  # the time; 0.0 where the writer did not record it
STOP_SEEN_TIME_AT = 136

MAX_METRICS = 64
MAX_METRIC_NAME_BYTES = 64
MAX_PHASE_BYTES = 32
RECENT_STEPS = 32

_SLOT_HEAD = struct.Struct("<QII")  # counter, CRC-32, payload bytes
_READ_ATTEMPTS = 100


class ProgressPageError(Exception):
    """A file is not a progress page of this version; the rank actor must create it with ProgressPage.create."""


@dataclass(frozen=True, slots=True)
class Slots:
    """One double-buffered record: two slots of ``slot_bytes`` from ``offset`` on."""

    offset: int
    slot_bytes: int

    @property
    def capacity(self) -> int:
        """Return the most payload bytes of one record."""
        return self.slot_bytes - _SLOT_HEAD.size

    def last_counter(self, page: mmap.mmap | bytes) -> int:
        """Return the counter to continue from: of the newest complete slot."""
        return max(counter for counter, _ in self._both(page))

    def publish(self, page: mmap.mmap, counter: int, payload: bytes | bytearray) -> None:
        """Write ``payload`` as record number ``counter`` over the older slot. No system call."""
        start = self.offset + (counter & 1) * self.slot_bytes
        crc = zlib.crc32(payload, counter & 0xFFFFFFFF)
        page[start : start + _SLOT_HEAD.size + len(payload)] = _SLOT_HEAD.pack(counter, crc, len(payload)) + payload

    def newest(self, take: Callable[[], bytes]) -> bytes | None:
        """Return the newest complete payload of the page that ``take`` reads, or None when nothing was ever written.

        Raises ProgressPageError when both slots stay unreadable, which only damage from outside can cause.
        """
        for _ in range(_READ_ATTEMPTS):
            page = take()
            counter, payload = max(self._both(page), key=lambda slot: slot[0])
            if payload is not None:
                return payload
            if counter == 0 and self._untouched(page):
                return None
        raise ProgressPageError("both records of the progress page are damaged; create the page anew")

    def _both(self, page: mmap.mmap | bytes) -> tuple[tuple[int, bytes | None], tuple[int, bytes | None]]:
        return self._slot(page, 0), self._slot(page, 1)

    def _slot(self, page: mmap.mmap | bytes, index: int) -> tuple[int, bytes | None]:
        start = self.offset + index * self.slot_bytes
        raw = page[start : start + self.slot_bytes]
        counter, crc, length = _SLOT_HEAD.unpack_from(raw)
        if counter == 0 or length > self.capacity:
            return 0, None
        payload = raw[_SLOT_HEAD.size : _SLOT_HEAD.size + length]
        return (counter, payload) if zlib.crc32(payload, counter & 0xFFFFFFFF) == crc else (0, None)

    def _untouched(self, page: bytes) -> bool:
        """Whether neither slot was ever completed: a first write interrupted by a kill counts as nothing written."""
        second = self.offset + self.slot_bytes
        # Record 1 goes to slot 1, record 2 to slot 0: while slot 0 is blank, at most one write was begun.
        return page[self.offset : self.offset + _SLOT_HEAD.size] == bytes(_SLOT_HEAD.size) and second < len(page)


HOT = Slots(offset=512, slot_bytes=4096)
FACTS = Slots(offset=512 + 2 * 4096, slot_bytes=3840)
assert FACTS.offset + 2 * FACTS.slot_bytes <= PAGE_BYTES

# step, max_step, total_steps, samples, tokens, new_step, steps_reported, durations recorded, metrics dropped,
# snapshot_step, saves; epoch, first_step_at, new_step_at, last_step_at, last_report_at, step_seconds, phase_since,
# saving_since, snapshot_at, save_seconds, busy_seconds; phase bytes, metrics
HOT_FIXED = struct.Struct("<11q11dHH")
RECENT = struct.Struct(f"<{RECENT_STEPS}d")
METRICS_CAPACITY = HOT.capacity - HOT_FIXED.size - RECENT.size - MAX_PHASE_BYTES


def create_page(target: Path) -> int:
    """Create a blank page at ``target``, replacing an existing one; mode 0600. Returns its descriptor, which the caller closes."""
    blank = bytearray(PAGE_BYTES)
    HEADER.pack_into(blank, 0, MAGIC, LAYOUT_VERSION, PAGE_BYTES)
    draft = target.with_name(f"{target.name}.{os.getpid()}.new")
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, blank)
        draft.replace(target)  # a reader sees the old page or a whole new one
    except BaseException:
        os.close(handle)
        raise
    return handle


STEP_SECONDS_WEIGHT = 0.1  # weight of the newest step in the running mean: about the last twenty steps count
_MAX_MESSAGE_CHARS = 400
_MAX_PATH_CHARS = 800
_PATHS = ("saved_path", "resumed_path")
_MAX_QUARANTINED = 3
_NONE = -1  # an optional count without a report


class ProgressPage:
    """A mapped progress page, for the rank. Its actor reads it and requests a stop through ``progress_reading.PageReader``.

    Only one process may write at a time: see ``claim``. Writes are serialised among threads.
    """

    def __init__(self, path: Path, page: mmap.mmap, previous_step: int = _NONE) -> None:
        self.path = path
        self._page = page
        self._lock = threading.Lock()
        self._previous_step = previous_step
        self._hot_counter = HOT.last_counter(page)
        self._facts_counter = FACTS.last_counter(page)
        self._counts = [_NONE, _NONE, _NONE, _NONE, _NONE, _NONE, 0, 0, 0, _NONE, 0]
        self._epoch = self._step_seconds = self._save_seconds = self._busy_seconds = math.nan
        self._first_at = self._new_at = self._last_at = self._phase_since = self._saving_since = self._snapshot_at = 0.0
        self._phase = b""
        self._recent = array("d", bytes(8 * RECENT_STEPS))
        self._index: dict[str, int] = {}
        self._values = array("d")
        self._names = b""
        self._last_clock: float | None = None
        self._last_busy = (0, 0.0)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, previous_step: int | None = None) -> Self:
        """Map an existing page. ``previous_step`` is the last step of the previous attempt, for ``new_step``.

        Raises ProgressPageError when the file is missing, short, or of another version.
        """
        target = Path(path)
        try:
            handle = os.open(target, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ProgressPageError(f"{target}: {error.strerror}; the rank actor creates this file first") from error
        try:
            if os.fstat(handle).st_size != PAGE_BYTES:
                raise ProgressPageError(f"{target} is not a progress page: {PAGE_BYTES} bytes expected")
            page = mmap.mmap(handle, PAGE_BYTES)
        finally:
            os.close(handle)
        if HEADER.unpack_from(page) != (MAGIC, LAYOUT_VERSION, PAGE_BYTES):
            page.close()
            raise ProgressPageError(f"{target} is not a progress page of version {LAYOUT_VERSION}")
        return cls(target, page, _NONE if previous_step is None else previous_step)

    def close(self) -> None:
        """Unmap; the file stays. Using the page afterwards raises ValueError."""
        self._page.close()

    def claim(self) -> bool:
        """Make this process the writer; False when another live process is one (a data-loader worker must not report)."""
        holder = WRITER_PID.unpack_from(self._page, WRITER_PID_AT)[0]
        if holder not in (0, os.getpid()) and _alive(holder):
            return False
        WRITER_PID.pack_into(self._page, WRITER_PID_AT, os.getpid())
        return True

    def write(
        self,
        *,
        step: int | None = None,
        total_steps: int | None = None,
        epoch: float | None = None,
        phase: str | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Record a report. Omitted values keep their last value; metrics are merged by name.

        A step below the highest one so far (a restarted counter, an evaluation loop) is shown as ``step``, but counts
        neither as an advance nor for the step time. More than 64 metrics, or names longer than 64 bytes, are
        dropped and counted.
        """
        with self._lock:
            now = time.time()
            changed_phase = phase is not None and self._enter(phase, now)
            if step is not None:
                self._advance(step, now, timed=not changed_phase)
            counts = self._counts
            if total_steps is not None:
                counts[2] = total_steps
            if samples is not None:
                counts[3] = samples
            if tokens is not None:
                counts[4] = tokens
            if epoch is not None:
                self._epoch = epoch
            if metrics:
                self._merge(metrics)
            self._publish(now)

    def write_saving(self) -> None:
        """Record that a save to storage stalls the loop from now on."""
        with self._lock:
            now = time.time()
            self._saving_since = now
            self._publish(now)

    def write_saved(self, seconds: float, *, snapshot_step: int | None = None, counts: bool = True) -> None:
        """Record the end of a save that stalled the loop for ``seconds``, with a snapshot of ``snapshot_step``, if given.

        A save that failed does not count.
        """
        with self._lock:
            now = time.time()
            self._saving_since = 0.0
            self._save_seconds = seconds
            if self._last_clock is not None:
                self._last_clock += seconds  # a step's duration does not include the save in it
            # A snapshot is a copy in memory, which uses a processor all the time.
            self._last_busy = (self._last_busy[0], self._last_busy[1] + seconds)
            if snapshot_step is not None:
                self._counts[9], self._snapshot_at = snapshot_step, now
            self._counts[10] += counts
            self._publish(now)

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Publish facts about checkpoints, by the names of ``progress_reading.CheckpointFacts``; long texts are cut to fit the page."""
        body = _facts_body(facts)
        payload = json.dumps(body, separators=(",", ":")).encode()
        if len(payload) > FACTS.capacity:  # only for texts full of escapes
            body = {name: text[:100] if isinstance(text, str) else text for name, text in body.items()}
            payload = json.dumps({**body, "quarantined": []}, separators=(",", ":")).encode()
        with self._lock:
            self._facts_counter += 1
            FACTS.publish(self._page, self._facts_counter, payload)

    def mark_stop_seen(self) -> None:
        """Record when the training loop first saw the stop request; the rank's keeper reads it after the rank's end."""
        if self._page[STOP_SEEN_AT] == 0:
            STOP_SEEN_TIME.pack_into(self._page, STOP_SEEN_TIME_AT, time.time())
            self._page[STOP_SEEN_AT] = 1

    @property
    def stop_requested(self) -> bool:
        """Whether the actor requested a stop; about 50 ns."""
        return self._page[STOP_REQUESTED_AT] != 0

    # Inside a write, under the lock

    def _enter(self, phase: str, now: float) -> bool:
        raw = phase.encode()[:MAX_PHASE_BYTES]
        if raw == self._phase:
            return False
        self._phase, self._phase_since = raw, now
        return True

    def _advance(self, step: int, now: float, *, timed: bool) -> None:
        counts = self._counts
        counts[0] = step
        highest = counts[1]
        clock = time.perf_counter()
        if step <= highest:
            return
        if timed and self._last_clock is not None:
            self._sample((clock - self._last_clock) / (step - highest))
            self._sample_busy(step - highest)
        self._last_clock = clock
        self._last_busy = (threading.get_ident(), time.thread_time())
        counts[1] = step
        counts[6] += 1
        self._last_at = now
        if self._first_at == 0.0:
            self._first_at = now
        if self._new_at == 0.0 and step > self._previous_step:
            self._new_at, counts[5] = now, step

    def _sample(self, seconds: float) -> None:
        recorded = self._counts[7]
        self._recent[recorded % RECENT_STEPS] = seconds
        self._counts[7] = recorded + 1
        old = self._step_seconds
        self._step_seconds = seconds if recorded == 0 else old + STEP_SECONDS_WEIGHT * (seconds - old)

    def _sample_busy(self, steps: int) -> None:
        """Sample the processor time of a step before the clocks are reset; skip it if the training thread changed."""
        thread, since = self._last_busy
        if thread != threading.get_ident():
            return
        seconds = max(0.0, time.thread_time() - since) / steps
        old = self._busy_seconds
        self._busy_seconds = seconds if math.isnan(old) else old + STEP_SECONDS_WEIGHT * (seconds - old)

    def _merge(self, metrics: Mapping[str, float]) -> None:
        index, values = self._index, self._values
        for name, value in metrics.items():
            at = index.get(name)
            if at is None:
                self._add_metric(name, value)
            else:
                values[at] = value

    def _add_metric(self, name: str, value: float) -> None:
        raw = name.encode(errors="replace")
        room = METRICS_CAPACITY - len(self._names) - 8 * len(self._values)
        if len(self._index) >= MAX_METRICS or len(raw) > MAX_METRIC_NAME_BYTES or len(raw) + 9 > room:
            self._counts[8] += 1
            return
        self._index[name] = len(self._values)
        self._values.append(value)
        self._names += bytes((len(raw),)) + raw

    def _publish(self, now: float) -> None:
        fixed = HOT_FIXED.pack(
            *self._counts,
            self._epoch,
            self._first_at,
            self._new_at,
            self._last_at,
            now,
            self._step_seconds,
            self._phase_since,
            self._saving_since,
            self._snapshot_at,
            self._save_seconds,
            self._busy_seconds,
            len(self._phase),
            len(self._values),
        )
        payload = b"".join((fixed, self._recent, self._phase, self._values, self._names))
        self._hot_counter += 1
        HOT.publish(self._page, self._hot_counter, payload)


def _facts_body(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with their texts cut; of the quarantined checkpoints the last ones."""
    body = {
        n: v[: _MAX_PATH_CHARS if n in _PATHS else _MAX_MESSAGE_CHARS] if isinstance(v, str) else v
        for n, v in facts.items()
    }
    if quarantined := body.get("quarantined"):
        body["quarantined"] = [text[:_MAX_MESSAGE_CHARS] for text in quarantined[-_MAX_QUARANTINED:]]
    return body


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
