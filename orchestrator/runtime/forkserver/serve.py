"""F's main loop: warm up, then serve.

Owns the listening socket and the list of keepers. One thread, one poll loop; every peer has a deadline for its request,
so a slow one delays no other. Ends on request, or when its socket's file is removed or replaced; keepers and their jobs
continue in either case.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import select
import signal
import socket
import struct
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from . import cgroups, keeper, linux, proctree, request, spares, startup, wire
from .warm import Baseline, NotServableError, warm

if TYPE_CHECKING:
    from collections.abc import Callable

    from .program.launch import Program

_REQUEST_SECONDS = 10.0
_READ_BYTES = 262144


def main(startup_modules: frozenset[str]) -> Program | None:
    """Run the server. Returns a program in each training process, None when the server itself has ended."""
    options = startup.parse_options()
    claim = startup.become_the_server(options)
    if claim is None:
        return None
    linux.become_subreaper()
    linux.restore_priorities()
    linux.reset_signals(python=True)
    linux.unblock_signals()
    # Clients that connect while the server warms up wait in the backlog.
    server = Server(claim.listener, options.socket, claim.lock, startup.Owner(options.of_process))
    try:
        baseline = warm(options.preload, log, startup_modules, cold=options.cold)
    except NotServableError as error:
        log("forkserver.not_servable", error=str(error))
        if options.cold is None:
            startup.start_over_cold(options, claim, str(error))
        server.close()
        raise SystemExit(1) from None
    linux.set_title(f"orch-forkserver {sys.executable} {options.socket}")
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

    def __init__(self, listener: socket.socket, path: str, lock: int, owner: startup.Owner) -> None:
        self._owner = owner
        self._listener = listener
        self._path = path
        self._lock = lock
        self._identity = _identity(path)
        self._connections: dict[int, _Connection] = {}
        self._keepers: dict[int, str] = {}  # process number -> the mode of its request
        self._spares = spares.Spares()
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
            for descriptor in self._ready(self._restartable(baseline)):
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
            if self._spares.adjust(self._restartable(baseline)):
                program = self._fork_ahead(baseline)
                if program is not None:
                    return program
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
        self._spares.close()
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
        self._spares.abandon()

    def _ready(self, needed: int) -> list[int]:
        poll = select.poll()
        for descriptor in (self._listener.fileno(), self._wake.fileno(), *self._owner.descriptors, *self._connections):
            poll.register(descriptor, select.POLLIN)
        seconds = min(startup.TICK_SECONDS, self._spares.look_again_seconds(needed))
        return [descriptor for descriptor, _ in poll.poll(math.ceil(seconds * 1000))]

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
                if self._spares.forget(pid):
                    log("forkserver.spare_ended", pid=pid, status=os.waitstatus_to_exitcode(status))
                else:
                    left_something |= pid not in self._keepers or status != 0
                    self._keepers.pop(pid, None)
        if left_something:
            for pid in set(proctree.children(os.getpid())) - self._keepers.keys() - set(self._spares.pids):
                log("forkserver.orphan_killed", pid=pid)
                proctree.kill(pid, signal.SIGKILL)

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
            spawn = request.parse(message, fds)
        except request.BadRequestError as error:
            _close(fds)
            return _refusal("bad_request", str(error)), None
        self._spares.asked()
        if spawn.mode != "command" and not spawn.cold:
            spare = self._spares.hand_over(message, fds)
            if spare is not None:
                self._keepers[spare] = spawn.mode
                _close(fds)
                return _started(spare, spawn), None
        linux.block_signals()
        try:
            pid = os.fork()
        except OSError as error:
            linux.unblock_signals()
            _close(fds)
            return _refusal("fork", f"cannot fork: {error.strerror}"), None
        if pid == 0:
            self._abandon()
            return {}, _or_die(functools.partial(keeper.keep, spawn, baseline))
        linux.unblock_signals()
        self._keepers[pid] = spawn.mode
        _close(fds)
        return _started(pid, spawn), None

    def _restartable(self, baseline: Baseline) -> int:
        """Return how many running processes a spare could replace faster at a restart."""
        return 0 if baseline.cold is not None else sum(mode != "command" for mode in self._keepers.values())

    def _fork_ahead(self, baseline: Baseline) -> Program | None:
        """Fork one more spare; returns a program in the training process that it becomes."""
        ours, theirs = socket.socketpair()
        linux.block_signals()
        try:
            pid = os.fork()
        except OSError as error:
            linux.unblock_signals()
            ours.close()
            theirs.close()
            self._spares.asked()  # delay the next try
            log("forkserver.no_spare", error=str(error))
            return None
        if pid == 0:
            self._abandon()
            ours.detach()
            return _or_die(functools.partial(spares.wait_for_request, theirs.detach(), baseline))
        linux.unblock_signals()
        theirs.close()
        self._spares.add(pid, ours)
        return None


def _or_die(start: Callable[[], Program]) -> Program:
    """Call ``start`` in the fork; exit on an error, which must not unwind into the server's loop."""
    try:
        return start()
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
        os._exit(1)


def _started(keeper_pid: int, spawn: request.Spawn) -> dict[str, Any]:
    """Return the reply. The owner sends `go` only if its ``gated`` is true: keepers of earlier versions reject it."""
    return {"ok": True, "keeper_pid": keeper_pid, "gated": spawn.gated}


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
