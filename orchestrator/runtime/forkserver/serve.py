"""F: how it becomes the one server of its socket, as a child of init, and its main loop: warm up, then serve.

Owns the daemon's two forks, the lock beside the socket, the socket and its file, and the list of keepers. One thread, one poll loop; every
peer has a deadline for its request, so a slow one delays no other. Ends on request, or when its socket's file is removed or replaced; keepers
and their jobs continue in either case. Errors before the server listens go to the starter, which waits for one line; after that line they go
to the log only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import select
import signal
import socket
import stat
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from . import cgroups, keeper, linux, wire
from .warm import Baseline, NotServableError, warm

if TYPE_CHECKING:
    from .launch import Program

TICK_SECONDS = 2.0
"""Interval at which an idle server checks whether its socket's file still exists."""

MAX_LOG_BYTES = 2**20
"""A log that is longer when a server starts is emptied: it is on the node's disk, and servers start after each loss of a head."""

_LOCK_RETRY_SECONDS = 0.05
_BACKLOG = 128
_REQUEST_SECONDS = 10.0
_READ_BYTES = 262144


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


def main(startup_modules: frozenset[str]) -> Program | None:
    """Run the server. Returns a program in each training process, None when the server itself has ended."""
    options = parse_options()
    claim = become_the_server(options)
    if claim is None:
        return None
    linux.become_subreaper()
    linux.restore_priorities()
    linux.reset_signals(python=True)
    linux.unblock_signals()
    # Clients that connect while the server warms up wait in the backlog.
    server = Server(claim.listener, options.socket, claim.lock, Owner(options.of_process))
    try:
        baseline = warm(options.preload, log, startup_modules, cold=options.cold)
    except NotServableError as error:
        log("forkserver.not_servable", error=str(error))
        if options.cold is None:
            start_over_cold(options, claim, str(error))
        server.close()
        raise SystemExit(1) from None
    linux.set_process_name("orch-forkserver")
    cgroups.remove_empty(cgroups.find_place())
    log("forkserver.ready", pid=os.getpid(), warm_seconds=round(baseline.warm_seconds, 3), torch=baseline.torch_version)
    return server.serve(baseline)


def log(event: str, **fields: object) -> None:
    """Write one line of JSON to the server's log."""
    line = json.dumps({"at": time.time(), "event": event, **fields})
    os.write(2, line.encode("ascii") + b"\n")


class _Connection:
    """One client: bytes and descriptors as they arrive."""

    __slots__ = ("deadline", "reader", "socket")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.reader = wire.RequestReader()
        self.deadline = time.monotonic() + _REQUEST_SECONDS

    def close(self) -> None:
        self.socket.close()
        _close(self.reader.take_fds())


class Server:
    """The loop. `serve` returns in every training process that it has forked, and at its own end."""

    def __init__(self, listener: socket.socket, path: str, lock: int, owner: Owner) -> None:
        self._owner = owner
        self._listener = listener
        self._path = path
        self._lock = lock
        self._identity = _identity(path)
        self._connections: dict[int, _Connection] = {}
        self._keepers: set[int] = set()
        self._running = True
        self._wake, writer = socket.socketpair()
        self._wake.setblocking(False)
        writer.setblocking(False)
        signal.signal(signal.SIGCHLD, _noted)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)

    def _on_terminate(self, _number: int, _frame: object) -> None:
        self._running = False

    def serve(self, baseline: Baseline) -> Program | None:
        """Serve until the server must stop; return the program in a training process, None in the server."""
        while self._running:
            for descriptor in self._ready():
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor == self._wake.fileno():
                    self._drain()
                elif descriptor in self._owner.descriptors:
                    self._owner.note_end()
                else:
                    program = self._attend(self._connections[descriptor], baseline)
                    if program is not None:
                        return program
            self._reap()
            self._expire()
            if self._owner.ended and not self._keepers and not self._connections:
                log("forkserver.owner_ended")
                self._running = False
            if _identity(self._path) != self._identity:
                log("forkserver.socket_gone", path=self._path)
                self._running = False
        self.close()
        return None

    def close(self) -> None:
        """Stop listening, and remove the socket's file if it is still this server's."""
        if _identity(self._path) == self._identity:
            os.unlink(self._path)
        self._listener.close()
        for connection in list(self._connections.values()):
            self._drop(connection)
        os.close(self._lock)
        log("forkserver.ended", pid=os.getpid())

    def _abandon(self) -> None:
        """Detach the server's descriptors in a fork without closing them.

        The keeper closes them by number. An object that closed them later, when the training process collects it, would
        close whatever has that number by then.
        """
        for sock in (self._listener, self._wake, *(connection.socket for connection in self._connections.values())):
            sock.detach()
        self._connections.clear()

    def _ready(self) -> list[int]:
        poll = select.poll()
        for descriptor in (self._listener.fileno(), self._wake.fileno(), *self._owner.descriptors, *self._connections):
            poll.register(descriptor, select.POLLIN)
        return [descriptor for descriptor, _ in poll.poll(TICK_SECONDS * 1000)]

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # the client has left, or no descriptors are free until a connection ends
        sock.setblocking(False)
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _pid, uid, _gid = struct.unpack("3i", credentials)
        if uid != os.geteuid():
            sock.close()
            return
        self._connections[sock.fileno()] = _Connection(sock)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(_READ_BYTES)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket.fileno(), None)
        connection.close()

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.deadline < now:
                self._drop(connection)

    def _reap(self) -> None:
        """Reap exited keepers; kill what a dead keeper left behind.

        A keeper exits by itself only when no process is left below it. One that died otherwise leaves its tree, and
        each orphan that dies leaves its own children to this process: every such death triggers another sweep.
        """
        left_something = False
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                left_something |= pid not in self._keepers or status != 0
                self._keepers.discard(pid)
        if left_something:
            for pid in set(linux.children(os.getpid())) - self._keepers:
                log("forkserver.orphan_killed", pid=pid)
                linux.kill(pid, signal.SIGKILL)

    # -- requests

    def _attend(self, connection: _Connection, baseline: Baseline) -> Program | None:
        try:
            message = connection.reader.receive(connection.socket)
        except BlockingIOError:
            return None
        except (EOFError, OSError, wire.WireError):
            self._drop(connection)
            return None
        if message is None:
            return None
        connection.deadline = time.monotonic() + _REQUEST_SECONDS
        reply, program = self._answer(message, connection, baseline)
        if program is not None:
            return program
        try:
            connection.socket.send(wire.encode(reply))
        except OSError:
            self._drop(connection)
        return None

    def _answer(
        self, message: dict[str, Any], connection: _Connection, baseline: Baseline
    ) -> tuple[dict[str, Any], Program | None]:
        # A client of any version may end a server that it cannot use.
        if message.get("protocol") != wire.PROTOCOL and message.get("op") != "shutdown":
            return _refusal(
                "version", f"the server speaks protocol {wire.PROTOCOL}, not {message.get('protocol')}"
            ), None
        match message.get("op"):
            case "hello":
                return self._hello(baseline), None
            case "shutdown":
                self._running = False
                return {"ok": True}, None
            case "spawn":
                return self._spawn(message, connection, baseline)
            case other:
                return _refusal("bad_request", f"unknown request {other!r}"), None

    def _hello(self, baseline: Baseline) -> dict[str, Any]:
        return {
            "ok": True,
            "protocol": wire.PROTOCOL,
            "pid": os.getpid(),
            "executable": baseline.python,
            "python": platform.python_version(),
            "torch": baseline.torch_version,
            "warm_seconds": baseline.warm_seconds,
            "cold": baseline.cold,
            "keepers": len(self._keepers),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "oom_score_adj": linux.oom_score_adjustment(),
        }

    def _spawn(
        self, message: dict[str, Any], connection: _Connection, baseline: Baseline
    ) -> tuple[dict[str, Any], Program | None]:
        fds = connection.reader.take_fds()
        try:
            spawn = wire.parse(message, fds)
        except wire.BadRequestError as error:
            _close(fds)
            return _refusal("bad_request", str(error)), None
        linux.block_signals()
        try:
            pid = os.fork()
        except OSError as error:
            linux.unblock_signals()
            _close(fds)
            return _refusal("fork", f"cannot fork: {error.strerror}"), None
        if pid == 0:
            self._abandon()
            return {}, _keep(spawn, baseline)
        linux.unblock_signals()
        self._keepers.add(pid)
        _close(fds)
        return {"ok": True, "keeper_pid": pid}, None


def _keep(spawn: wire.Spawn, baseline: Baseline) -> Program:
    """Become a keeper, in the fork; exit on an error, which must not unwind into the server's loop."""
    try:
        return keeper.keep(spawn, baseline)
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
        os._exit(1)


def _refusal(code: str, message: str) -> dict[str, Any]:
    return {"ok": False, "code": code, "error": message}


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _noted(_number: int, _frame: object) -> None:
    """Do nothing: a signal's only effect is the byte that the interpreter writes to the wake-up socket."""


# -- becoming the server


def parse_options() -> argparse.Namespace:
    """Parse the command line, which only spawn/client.py writes."""
    parser = argparse.ArgumentParser(prog="orch-forkserver", description="Forks training processes; started by orch.")
    parser.add_argument("--socket", required=True, help="Unix socket to listen on; NAME.lock beside it is the lock")
    parser.add_argument("--log", required=True, help="file that the server and its keepers append to")
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
    command += ["--cold", reason, "--inherited", *map(str, numbers)]
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
    if os.fstat(log).st_size > MAX_LOG_BYTES:
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
