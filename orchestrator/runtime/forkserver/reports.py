"""Reports from a training process to its keeper: ready, the exception that ends it, and a SIGTERM; and its last progress page.

Owns one shared memory mapping and one signal. It uses no file descriptor, because a script may close or count all that it
finds. The training process appends JSON lines, then sends SIGUSR1 to its keeper; the keeper reads at the signal and
once more when the process has ended, so a report is never lost with its sender.

Of the progress page only the few fields that an exit record needs are read. The layout is that of train/script/progress.py, which the
user's interpreter may lack; a test compares the numbers. The rank can write anything to its page: an unreadable page gives no facts, and never
prevents the exit record.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import stat
import struct
import time
import zlib
from dataclasses import dataclass
from typing import Any

from . import wire
from .masking import Masker

_SIZE_BYTES = 256 * 1024
_LENGTH = struct.Struct("=I")
_TERMINATED_AT = struct.Struct("=d")  # after the length; a time, 0.0 before it is set
_HEAD_BYTES = _LENGTH.size + _TERMINATED_AT.size

MAX_TRACEBACK_CHARACTERS = 64 * 1024
MAX_MESSAGE_CHARACTERS = 8 * 1024


_MARK_CHARACTERS = 100  # maximum length of the line that replaces the middle of a text
_MAX_CHARACTERS = {
    "traceback": MAX_TRACEBACK_CHARACTERS,
    "message": MAX_MESSAGE_CHARACTERS,
    "missing_file": 4096,
}
_MAX_NAME_CHARACTERS = 1000
_NOTHING = type(None)
_REPORTS: dict[str, dict[str, tuple[type, ...]]] = {
    "started": {"pid": (int,), "cold": (str, _NOTHING), "at": (float, int)},
    "error": {"type": (str,), "message": (str,), "traceback": (str,), "missing_file": (str,), "at": (float, int)},
}


def clip(text: str, limit: int) -> str:
    """Return the text, its middle cut out where it is longer than `limit` characters: the ends are the most useful."""
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]}\n… {len(text) - limit} characters left out …\n{text[len(text) - (limit - head) :]}"


class Reports:
    """Reports in shared memory. The keeper creates the object before it forks; the child writes, the keeper reads."""

    __slots__ = ("_keeper", "_memory", "_read", "_writer", "masker")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE_BYTES)
        self._keeper = os.getpid()
        self._writer = 0
        self._read = _HEAD_BYTES
        self.masker = Masker(())
        """Masks secrets in the child before a text is cut: otherwise half a secret could remain."""

    def attach_writer(self) -> None:
        """Become the writer, in the child. Its own children inherit this object; their reports are dropped."""
        self._writer = os.getpid()

    def send(self, message: dict[str, Any]) -> None:
        """Append a message and wake the keeper; drop it when there is no room or the caller is not the writer."""
        if os.getpid() != self._writer:
            return
        line = wire.encode_line(message)
        used = max(_LENGTH.unpack_from(self._memory)[0], _HEAD_BYTES)
        if used + len(line) > _SIZE_BYTES:
            return
        self._memory[used : used + len(line)] = line
        _LENGTH.pack_into(self._memory, 0, used + len(line))
        try:
            os.kill(self._keeper, signal.SIGUSR1)
        except OSError:
            return  # the keeper reads again when this process ends

    def note_sigterm(self) -> None:
        """Record in the child the first time that SIGTERM has reached it. Wakes no thread, so a handler may call it."""
        if os.getpid() == self._writer and self.terminated_at is None:
            _TERMINATED_AT.pack_into(self._memory, _LENGTH.size, time.time())

    @property
    def terminated_at(self) -> float | None:
        """Return when SIGTERM first reached a handler of the child."""
        (at,) = _TERMINATED_AT.unpack_from(self._memory, _LENGTH.size)
        return at if math.isfinite(at) and at > 0 else None  # a script can write anything here

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages since the last call; called in the keeper.

        The child's script can write anything here. Only messages that a child may send, of the right types, are passed
        on: the owner would take any other for a message of the keeper.
        """
        used = min(_LENGTH.unpack_from(self._memory)[0], _SIZE_BYTES)
        if used <= self._read:
            return []
        lines = self._memory[self._read : used].split(b"\n")
        self._read = used
        return [message for line in lines if (message := _report(line)) is not None]


def _report(line: bytes) -> dict[str, Any] | None:
    try:
        message = wire.decode(line) if line else {}
    except (wire.WireError, RecursionError):
        return None
    fields = _REPORTS.get(str(message.get("event")), {})
    message.setdefault("missing_file", "")
    if not fields or not all(_fits(name, message.get(name), kind) for name, kind in fields.items()):
        return None
    return {"event": message["event"], **{name: message.get(name) for name in fields}}


def _fits(name: str, value: object, kind: tuple[type, ...]) -> bool:
    if type(value) not in kind or (isinstance(value, float) and not math.isfinite(value)):
        return False
    return (
        not isinstance(value, str) or len(value) <= _MAX_CHARACTERS.get(name, _MAX_NAME_CHARACTERS) + _MARK_CHARACTERS
    )


# -- the progress page


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
