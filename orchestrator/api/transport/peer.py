"""Who is at the daemon's end of a socket: its process, whether it is stopped, and whether one is starting or ending.

A daemon holds the lock beside its control socket from before it listens until its process has ended. For the command
line, only where no daemon answers: standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")
_CGROUPS = "/sys/fs/cgroup"


def credentials(sock: socket.socket) -> tuple[int, int, int] | None:
    """Return process id, user and group of the other end, from its peer credentials; None for another kind of socket.

    The process id is 0 where the process belongs to a PID namespace that cannot be seen from here.
    """
    if sock.family != socket.AF_UNIX:
        return None
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def is_stopped(pid: int) -> bool:
    """Return whether the process exists and is stopped: by SIGSTOP, by a debugger, or by its cgroup's freezer."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read(4096).rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in {b"T", b"t"} or _is_frozen(pid)


def _is_frozen(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            paths = [line.rstrip("\n").removeprefix("0::") for line in file if line.startswith("0::")]
        if not paths:
            return False
        with open(os.path.join(_CGROUPS, paths[0].lstrip("/"), "cgroup.events"), encoding="utf-8") as file:
            return "frozen 1" in file.read().splitlines()
    except OSError:
        return False


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
