"""The lock beside the control socket: a daemon holds it from before it listens until its process has ended.

For the command line, only where no daemon listens: standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

_SIGNATURE_BYTES = 32


def lock_path(socket_path: str) -> str:
    """Return the lock's file. It stays: removing it would let two processes hold two files of the same name."""
    return f"{socket_path}.lock"


def sign(lock: int) -> None:
    """Write this process's id to the lock's file; in place and padded, so that it works on a full disk."""
    with contextlib.suppress(OSError):  # only messages use the id
        os.pwrite(lock, f"{os.getpid()}\n".encode().ljust(_SIGNATURE_BYTES), 0)


def holder(socket_path: str) -> int | None:
    """Return the process that holds the lock: its id, or 0 if unknown. None if no process holds it.

    None as well for a lock that this user may not open.
    """
    try:
        lock = os.open(lock_path(socket_path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(lock, _SIGNATURE_BYTES, 0).split(b"\n", 1)[0].strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(lock)
    return None
