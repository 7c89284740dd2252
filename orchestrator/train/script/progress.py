"""The progress page: 16 KiB of shared memory through which a training process reports to its rank actor.

The rank process writes, the rank actor reads; only the request to stop flows back. A report costs a few microseconds
and one short system call, may be made every millisecond, and the latest one counts. Standard library only.

Must not: block training, allocate without bound, or ever show a half-written record (see progress_layout.py).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from orchestrator.train.script import progress_layout as layout
from orchestrator.train.script.progress_facts import CheckpointFacts, ProgressSnapshot, create_page
from orchestrator.train.script.progress_layout import ProgressPageError

if TYPE_CHECKING:
    from collections.abc import Mapping

STEP_SECONDS_WEIGHT = 0.1  # weight of the newest step in the running mean: about the last twenty steps count
_MAX_MESSAGE_CHARS = 400
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
        self._hot_counter = layout.HOT.last_counter(page)
        self._facts_counter = layout.FACTS.last_counter(page)
        self._counts = [_NONE, _NONE, _NONE, _NONE, _NONE, _NONE, 0, 0, 0, _NONE, 0]
        self._epoch = self._step_seconds = self._save_seconds = self._busy_seconds = math.nan
        self._first_at = self._new_at = self._last_at = self._phase_since = self._saving_since = self._snapshot_at = 0.0
        self._phase = b""
        self._recent = array("d", bytes(8 * layout.RECENT_STEPS))
        self._index: dict[str, int] = {}
        self._values = array("d")
        self._names = b""
        self._last_clock: float | None = None
        self._last_busy = (0, 0.0)

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Self:
        """Create a blank page at ``path`` (normally under /dev/shm), replacing an existing one; mode 0600."""
        target = Path(path)
        os.close(create_page(target))
        return cls.open(target)

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
            if os.fstat(handle).st_size != layout.PAGE_BYTES:
                raise ProgressPageError(f"{target} is not a progress page: {layout.PAGE_BYTES} bytes expected")
            page = mmap.mmap(handle, layout.PAGE_BYTES)
        finally:
            os.close(handle)
        if layout.HEADER.unpack_from(page) != (layout.MAGIC, layout.LAYOUT_VERSION, layout.PAGE_BYTES):
            page.close()
            raise ProgressPageError(f"{target} is not a progress page of version {layout.LAYOUT_VERSION}")
        return cls(target, page, _NONE if previous_step is None else previous_step)

    def close(self) -> None:
        """Unmap; the file stays. Using the page afterwards raises ValueError."""
        self._page.close()

    def claim(self) -> bool:
        """Make this process the writer; False when another live process is one (a data-loader worker must not report)."""
        holder = layout.WRITER_PID.unpack_from(self._page, layout.WRITER_PID_AT)[0]
        if holder not in (0, os.getpid()) and _alive(holder):
            return False
        layout.WRITER_PID.pack_into(self._page, layout.WRITER_PID_AT, os.getpid())
        return True

    # Methods of the rank

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

    def write_facts(self, facts: CheckpointFacts) -> None:
        """Publish facts about checkpoints; long texts are cut to fit the page."""
        body = _facts_body(facts)
        payload = json.dumps(body, separators=(",", ":")).encode()
        if len(payload) > layout.FACTS.capacity:  # only for texts full of escapes
            for name in ("saved_path", "resumed_path", "failure", "interval_reason", "snapshots_off"):
                body[name] = body[name][:100]
            payload = json.dumps({**body, "quarantined": []}, separators=(",", ":")).encode()
        with self._lock:
            self._facts_counter += 1
            layout.FACTS.publish(self._page, self._facts_counter, payload)

    def mark_stop_seen(self) -> None:
        """Record when the training loop first saw the stop request; the rank's keeper reads it after the rank's end."""
        if self._page[layout.STOP_SEEN_AT] == 0:
            layout.STOP_SEEN_TIME.pack_into(self._page, layout.STOP_SEEN_TIME_AT, time.time())
            self._page[layout.STOP_SEEN_AT] = 1

    @property
    def stop_requested(self) -> bool:
        """Whether the actor requested a stop; about 50 ns."""
        return self._page[layout.STOP_REQUESTED_AT] != 0

    # Methods of the actor

    def request_stop(self) -> None:
        """Request that the training loop saves and ends; ``should_stop()`` is true from now on. Irrevocable."""
        self._page[layout.STOP_REQUESTED_AT] = 1

    def read(self) -> ProgressSnapshot:
        """Return the newest complete report; a blank snapshot before the first one. Raises ProgressPageError for a damaged page.

        The rank actor uses ``progress_reading.PageReader``, which survives a page that the rank has truncated.
        """
        from orchestrator.train.script.progress_reading import snapshot_of  # the writer does not need it

        return snapshot_of(lambda: self._page[:])

    # Inside a write, under the lock

    def _enter(self, phase: str, now: float) -> bool:
        raw = phase.encode()[: layout.MAX_PHASE_BYTES]
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
        self._recent[recorded % layout.RECENT_STEPS] = seconds
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
        room = layout.METRICS_CAPACITY - len(self._names) - 8 * len(self._values)
        if len(self._index) >= layout.MAX_METRICS or len(raw) > layout.MAX_METRIC_NAME_BYTES or len(raw) + 9 > room:
            self._counts[8] += 1
            return
        self._index[name] = len(self._values)
        self._values.append(value)
        self._names += bytes((len(raw),)) + raw

    def _publish(self, now: float) -> None:
        fixed = layout.HOT_FIXED.pack(
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
        layout.HOT.publish(self._page, self._hot_counter, payload)


def _facts_body(facts: CheckpointFacts) -> dict[str, Any]:
    body = {name: getattr(facts, name) for name in CheckpointFacts.__dataclass_fields__}
    for name in ("failure", "interval_reason", "snapshots_off"):
        body[name] = body[name][:_MAX_MESSAGE_CHARS]
    body["saved_path"], body["resumed_path"] = facts.saved_path[:800], facts.resumed_path[:800]
    body["quarantined"] = [text[:_MAX_MESSAGE_CHARS] for text in facts.quarantined[-_MAX_QUARANTINED:]]
    return body


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
