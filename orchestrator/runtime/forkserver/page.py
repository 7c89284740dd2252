"""Reads from a progress page whether its rank was asked to stop, and its last steps.

Reads only the few fields that an exit record needs. The layout is that of train/script/progress.py, which the user's
interpreter may lack; a test compares the numbers. The rank can write anything to its page: an unreadable page gives no
facts, and never prevents the exit record.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import zlib
from dataclasses import dataclass

PAGE_BYTES = 16 * 1024
HEADER = struct.Struct("<8sII")
EXPECTED_HEADER = (b"ORCHPAGE", 2, PAGE_BYTES)
STOP_SEEN_AT = 128
STOP_SEEN_TIME = struct.Struct("<d")
STOP_SEEN_TIME_AT = 136
HOT_OFFSETS = (512, 512 + 4096)
HOT_CAPACITY = 4096 - 16
SLOT_HEAD = struct.Struct("<QII")
STEPS = struct.Struct("<3q")
"""The first fields of the hot record: step, highest step, total steps; below 0 where none was reported."""


@dataclass(frozen=True, slots=True)
class LastPage:
    """Content of a page after its writer has ended; None where it is unknown. Times are seconds since the epoch."""

    stop_seen_at: float | None = None
    last_step: int | None = None
    total_steps: int | None = None


def read_last_page(path: str | None, *, now: float) -> LastPage:
    """Read the page at ``path``; all None if it is unreadable. A stop seen at an unknown time counts as seen at ``now``."""
    raw = b"" if path is None else _bytes_of(path)
    if len(raw) != PAGE_BYTES or HEADER.unpack_from(raw) != EXPECTED_HEADER:
        return LastPage()
    steps = _steps(raw)
    return LastPage(stop_seen_at=stop_seen_at(raw, now=now), last_step=steps[0], total_steps=steps[1])


def stop_seen_at(raw: bytes, *, now: float) -> float | None:
    """Return when the training loop noticed a request to stop, from the page's bytes; None if it did not."""
    if raw[STOP_SEEN_AT] == 0:
        return None
    (at,) = STOP_SEEN_TIME.unpack_from(raw, STOP_SEEN_TIME_AT)
    return at if math.isfinite(at) and 0.0 < at <= now else now


def _bytes_of(path: str) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(handle, PAGE_BYTES + 1) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(handle)


def _steps(raw: bytes) -> tuple[int | None, int | None]:
    """Return the highest step and the total of the newest complete record."""
    newest, found = 0, (-1, -1)
    for offset in HOT_OFFSETS:
        counter, crc, length = SLOT_HEAD.unpack_from(raw, offset)
        start = offset + SLOT_HEAD.size
        payload = raw[start : start + min(length, HOT_CAPACITY)]
        whole = STEPS.size <= length <= HOT_CAPACITY and zlib.crc32(payload, counter & 0xFFFFFFFF) == crc
        if whole and counter > newest:
            newest, (_, *found_now) = counter, STEPS.unpack_from(payload)
            found = (found_now[0], found_now[1])
    highest, total = found
    return (highest if highest >= 0 else None), (total if total >= 0 else None)
