"""Lets blocking work end early once its result is not wanted any more: long reads look here between two pieces.

Who runs the work (``runtime/pools.py``) says in whose name it runs; elsewhere, as in a training process, no work is
abandoned and the calls here do nothing.
"""

from __future__ import annotations

import hashlib
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES: Final = 1024 * 1024

_here = threading.local()


class AbandonedError(Exception):
    """The result of this work is not wanted any more."""


class Readable(Protocol):
    """An open file."""

    def readinto(self, buffer: bytearray, /) -> int | None:
        """Read into the buffer; return the number of bytes, 0 at the end."""
        ...


@contextmanager
def abandonable(given_up: threading.Event) -> Iterator[None]:
    """Make this thread's work end at its next look once the event is set."""
    _here.given_up = given_up
    try:
        yield
    finally:
        _here.given_up = None


def stop_if_abandoned() -> None:
    """Raise AbandonedError once the result of this thread's work is not wanted."""
    given_up: threading.Event | None = getattr(_here, "given_up", None)
    if given_up is not None and given_up.is_set():
        raise AbandonedError


def sha256_of(file: Readable) -> tuple[str, int]:
    """Return the SHA-256 of a file from where it stands, and how many bytes that was. Raises AbandonedError."""
    digest, size, piece = hashlib.sha256(), 0, bytearray(PIECE_BYTES)
    view = memoryview(piece)
    while count := file.readinto(piece):
        digest.update(view[:count])
        size += count
        stop_if_abandoned()
    return digest.hexdigest(), size
