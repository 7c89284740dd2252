"""The bytes of a progress page: offsets, the two double-buffered records, and the flags beside them.

Owns the binary layout only; progress.py defines the values. Standard library only: the training process and the rank
actor import this, and both must start fast.

A record (``Slots``) has two slots. The writer fills the older slot and never touches the newer one, so a process that
is killed in the middle of a write leaves the previous record intact. Each slot has a counter and a CRC that covers both
counter and payload: a reader takes the valid slot with the higher counter, and a record that changed during the read
fails its CRC and is read again. That holds on any memory model, which a plain sequence lock in Python could not
guarantee.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

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

ENTERED = struct.Struct(
    "<IQI24s40s"
)  # process, number of the call in its group, the group, names of the collective and of the group
ENTERED_AT = (
    192  # written by runtime/forkserver/torch_changes/collective_calls.py, which owns these and the groups' bytes
)
GROUP = struct.Struct("<IQ")  # a group, and how many of its collectives were entered
GROUPS_AT = ENTERED_AT + ENTERED.size
MAX_GROUPS = 12

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
assert GROUPS_AT + MAX_GROUPS * GROUP.size <= HOT.offset
FACTS = Slots(offset=512 + 2 * 4096, slot_bytes=3840)
assert FACTS.offset + 2 * FACTS.slot_bytes <= PAGE_BYTES

# step, max_step, total_steps, samples, tokens, new_step, steps_reported, durations recorded, metrics dropped,
# snapshot_step, saves; epoch, first_step_at, new_step_at, last_step_at, last_report_at, step_seconds, phase_since,
# saving_since, snapshot_at, save_seconds, busy_seconds; phase bytes, metrics
HOT_FIXED = struct.Struct("<11q11dHH")
RECENT = struct.Struct(f"<{RECENT_STEPS}d")
METRICS_CAPACITY = HOT.capacity - HOT_FIXED.size - RECENT.size - MAX_PHASE_BYTES
