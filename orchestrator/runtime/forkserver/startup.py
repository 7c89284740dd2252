"""Starts F: a child of init, the only server of its socket.

Owns the daemon's two forks, the lock beside the socket, and the socket's file. Errors here go to the starter, which waits
for one line; after that line they go to the log only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import socket
import stat
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from . import linux, wire

TICK_SECONDS = 2.0
"""Interval at which an idle server checks whether its socket's file still exists."""

MOST_LOG_BYTES = 2**20
"""A log that is longer when a server starts is emptied: it is on the node's disk, and servers start after each loss of a head."""

_LOCK_RETRY_SECONDS = 0.05
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Claim:
    """Listening socket and lock, which a process must have to be the server."""

    listener: socket.socket
    lock: int


class Owner:
    """Process `pid` that the server ends with: on an existing cluster, the raylet of its node. None: there is none.

    An embedded head's fork server has none: it serves the next head of the same machine.
    """

    def __init__(self, pid: int | None) -> None:
        self.ended = False
        self._handle: int | None = None
        if pid is not None:
            try:
                self._handle = os.pidfd_open(pid)
            except ProcessLookupError:
                self.ended = True

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that become readable when the process ends."""
        return () if self._handle is None else (self._handle,)

    def note_end(self) -> None:
        """Record that the process has ended."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle, self.ended = None, True


def parse_options() -> argparse.Namespace:
    """Parse the command line, which only spawn/client.py writes."""
    parser = argparse.ArgumentParser(prog="orch-forkserver", description="Forks training processes; started by orch.")
    parser.add_argument("--socket", required=True, help="Unix socket to listen on; NAME.lock beside it is the lock")
    parser.add_argument("--log", required=True, help="file that the server and its keepers append to")
    parser.add_argument("--room", default="", help="ignored: reserves space for the title that `ps` shows")
    parser.add_argument("--cold", help="reason to import nothing; set by the server itself")
    parser.add_argument("--inherited", type=int, nargs=2, help="listener and lock of the process before this one")
    parser.add_argument("--of-process", type=int, help="end with that process, once nothing runs that was forked here")
    parser.add_argument("--preload", action="append", default=[], help="module to import as well, if it is there")
    return parser.parse_args()


def become_the_server(options: argparse.Namespace) -> Claim | None:
    """Return the claim, in the daemon. None in the starter's process, and in a daemon that is not needed or has failed."""
    if options.inherited is not None:
        return _inherit(*options.inherited)
    _refuse_shared(os.path.dirname(options.socket))
    os.umask(0o077)  # of the server and its keepers; a training process is given that of its request
    announce = _daemonize(options.log)
    if announce is None:
        return None
    try:
        lock, holder = _lock(f"{options.socket}.lock", options.socket)
        if lock is None:
            _announce(announce, {"already_running": True, "pid": holder})
            return None
        claim = Claim(_listen(options.socket), lock)
    except OSError as error:
        _announce(announce, {"error": f"cannot listen on {options.socket}: {error.strerror}; is its folder there?"})
        return None
    _announce(announce, {"already_running": False, "pid": os.getpid()})
    return claim


def _refuse_shared(directory: str) -> None:
    """End the starter's process where another user could replace the socket, or read the log."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise SystemExit(f"{directory} is not a directory of this user alone; remove it")


def start_over_cold(options: argparse.Namespace, claim: Claim, reason: str) -> NoReturn:
    """Replace this process, which must not be forked from, by one that has imported nothing.

    Process number, socket, waiting clients and lock stay: a process keeps its POSIX locks when it executes a program.
    """
    numbers = [claim.listener.fileno(), claim.lock]
    for number in numbers:
        os.set_inheritable(number, True)
    command = [sys.executable, "-u", sys.argv[0], "--socket", options.socket, "--log", options.log]
    command += ["--room", options.room, "--cold", reason, "--inherited", *map(str, numbers)]
    if options.of_process is not None:
        command += ["--of-process", str(options.of_process)]
    os.execv(sys.executable, command)


def _inherit(listener: int, lock: int) -> Claim:
    for number in (listener, lock):
        os.set_inheritable(number, False)
    return Claim(socket.socket(fileno=listener), lock)


def _daemonize(log_path: str) -> int | None:
    """Leave the starter's session and parent. Return the pipe to announce on in the daemon, None in the starter.

    The starter's process relays the announcement to its stdout and ends; the daemon is a child of init.
    """
    reader, writer = os.pipe()
    if os.fork() != 0:
        os.close(writer)
        _relay(reader)
        return None
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    os.chdir("/")
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    output = _open_log(log_path)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target, inheritable=True)
    linux.close_all_but({0, 1, 2, writer})
    return writer


def _open_log(path: str) -> int:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if os.fstat(log).st_size > MOST_LOG_BYTES:
        os.ftruncate(log, 0)
    return log


def _relay(reader: int) -> None:
    with os.fdopen(reader, "rb") as pipe:
        sys.stdout.buffer.write(pipe.read())
        sys.stdout.buffer.flush()


def _announce(pipe: int, message: dict[str, Any]) -> None:
    os.write(pipe, wire.encode_line(message))
    os.close(pipe)


def _lock(path: str, socket_path: str) -> tuple[int | None, int | None]:
    """Return the lock's descriptor, or None, and the holder's process number. Forks do not inherit a POSIX lock.

    A holder without a socket ends at its next tick, and one that has not written its number has just started: this waits
    for both. The kernel releases the lock when its holder ends.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + 2 * TICK_SECONDS
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            text = os.pread(handle, 32, 0)
            if (os.path.exists(socket_path) and text.isdigit()) or time.monotonic() > until:
                os.close(handle)
                return None, int(text) if text.isdigit() else None
            time.sleep(_LOCK_RETRY_SECONDS)
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle, os.getpid()


def _listen(path: str) -> socket.socket:
    """Create a socket file for this user only. The lock is held, so an existing file is a dead server's."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(mask)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
