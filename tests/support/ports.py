"""Ports for servers that a test starts in other processes, which cannot be given a bound socket.

A port that the kernel chose and that was closed again may go to any connection before its server binds it. These ports
are below the range from which the kernel chooses (32768 and up by default), and above those of Ray's workers (10002 to
19999). Each process of the suite counts from a place of its own, so that two of them seldom try the same port.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST: Final = 20_000
LAST: Final = 32_767
_numbers = itertools.count(os.getpid() * 61)


def free_port(numbers: Iterator[int] = _numbers) -> int:
    """Return a port of 127.0.0.1 that no process has bound, the first by ``numbers``. Raises OSError if there is none."""
    span = LAST - FIRST + 1
    for number in itertools.islice(numbers, span):
        port = FIRST + number % span
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {FIRST} to {LAST} is free")
