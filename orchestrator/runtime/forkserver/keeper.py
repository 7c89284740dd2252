"""K: parent, reaper and executioner of one training process.

Owns that process's exit record and its whole tree. Forked from the fork server per request, single-threaded, driven by
three things alone: signals (SIGCHLD, SIGUSR1 from the child's reports), the lifeline, and at most one deadline.

The order of things at a death is the point of it all: reap, write the exit record durably, tell the owner, kill what
is left, say that all is gone. The lifeline never blocks the keeper: what the owner does not read waits in memory, so a
frozen owner cannot hold up a deadline. End of file on the lifeline is an order to kill everything.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import signal
import socket
import stat
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from . import linux, proctree, wire
from .launch import Program, launch
from .masking import Masker
from .reports import Reports

if TYPE_CHECKING:
    from .request import Spawn
    from .warm import Baseline

RECORD_VERSION = 1

# Waiting for killed processes is driven by their deaths; this only bounds how long one missed by a sweep could live.
_SWEEP_SECONDS = 0.05
_SLOWEST_SWEEP_SECONDS = 1.0
_READ_BYTES = 65536

# Made by the owner beforehand, so that an end is on record whatever fills the disk meanwhile.
_ROOM_SUFFIX = ".room"
_SHORT_CHARACTERS = 200


def keep(spawn: Spawn, baseline: Baseline) -> Program:
    """Called in a fresh fork with all signals blocked. Returns in the training process alone, with what it is to run."""
    settle(spawn.descriptors(), baseline)
    reports = Reports()
    keeper_pid = os.getpid()
    started_at = time.time()
    child_pid = os.fork()
    if child_pid != 0:
        run(Keeper(spawn, reports, child_pid, started_at))
    return launch(spawn, baseline, reports, keeper_pid)


def settle(descriptors: set[int], baseline: Baseline) -> None:
    """Called in the fork that becomes a keeper: a session and a tree of its own, and only these descriptors."""
    os.setsid()
    linux.become_subreaper()
    linux.close_all_but({0, 1, 2} | descriptors | set(baseline.descriptors))


def run(keeper: Keeper) -> NoReturn:
    """Ends the process whatever happens; the child's parent-death signal takes the tree along."""
    code = 1
    try:
        keeper.run()
        code = 0
    except BaseException:
        sys.stderr.write(f"keeper {os.getpid()}: {traceback.format_exc()}")
    finally:
        os._exit(code)


class Keeper:
    """The keeper's state, from the fork to the last death."""

    def __init__(self, spawn: Spawn, reports: Reports, child_pid: int, started_at: float) -> None:
        self._spawn = spawn
        self._reports = reports
        self._child_pid = child_pid
        self._started_at = started_at
        self._masker = Masker(spawn.secrets)
        self._error: dict[str, Any] | None = None
        self._cause: str | None = None
        self._deadline = math.inf
        self._exited = False
        self._childless = False
        self._clearing = False
        self._sweep_seconds = _SWEEP_SECONDS
        self._lifeline: socket.socket | None = socket.socket(fileno=spawn.lifeline)
        self._lifeline.setblocking(False)
        self._lines = wire.LineReader()
        self._unsent = bytearray()
        self._wake = self._take_signals()

    def _take_signals(self) -> socket.socket:
        """Signals become bytes on a socket. Requests to end are ignored: a keeper ends when its tree has."""
        linux.set_process_name("orch-keeper")
        linux.set_title(f"orch-keeper of {self._child_pid}: {self._spawn.mode} {self._spawn.target}")
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTSTP):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, _noted)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        # What the child alone needs would keep its readers from seeing an end.
        for descriptor in self._spawn.descriptors() - {self._spawn.lifeline, self._spawn.lease}:
            os.close(descriptor)
        linux.unblock_signals()
        return reader

    def run(self) -> None:
        """Returns when nothing is left below this process and the owner has been told, or is gone."""
        while not (self._childless and self._lifeline is None):
            self._wait()
            self._relay_reports()
            self._reap()
            if time.monotonic() >= self._deadline:
                self._deadline = math.inf
                self._kill_all("stop_deadline")
            if self._clearing and not self._childless:
                proctree.kill_sweep(os.getpid())
                self._reap()
            self._flush()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._lifeline is not None:
            poll.register(self._lifeline, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        ready = {descriptor for descriptor, _ in poll.poll(self._timeout_milliseconds())}
        if self._wake.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(_READ_BYTES)
        if self._lifeline is not None and self._lifeline.fileno() in ready:
            self._read_lifeline()

    def _timeout_milliseconds(self) -> float | None:
        seconds = self._deadline - time.monotonic()
        if self._clearing and not self._childless:
            seconds = min(seconds, self._sweep_seconds)
            self._sweep_seconds = min(self._sweep_seconds * 2, _SLOWEST_SWEEP_SECONDS)
        return None if seconds == math.inf else max(math.ceil(seconds * 1000), 0)

    # -- the lifeline

    def _read_lifeline(self) -> None:
        assert self._lifeline is not None
        try:
            data = self._lifeline.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose_owner()
            return
        try:
            for command in self._lines.feed(data):
                self._obey(command)
        except (wire.WireError, KeyError, TypeError, ValueError) as error:
            sys.stderr.write(f"keeper {os.getpid()}: bad command from the owner: {error}\n")
            self._lose_owner()

    def _lose_owner(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
        self._lifeline = None
        self._unsent.clear()
        self._kill_all("lifeline")

    def _obey(self, command: dict[str, Any]) -> None:
        match command["cmd"]:
            case "signal":
                self._signal_group(int(command["signal"]))
            case "stop":
                self._deadline = min(self._deadline, time.monotonic() + float(command["grace_seconds"]))
                self._set_cause("stop")
                self._signal_group(signal.SIGTERM)
                self._signal_group(signal.SIGCONT)  # a stopped process could not even receive the first
            case "kill":
                self._kill_all("kill")
            case other:
                raise ValueError(f"unknown command {other!r}")

    def _signal_group(self, number: int) -> None:
        if self._exited:
            return
        try:
            os.killpg(self._child_pid, number)
        except ProcessLookupError:
            # Forked, but not yet the leader of its own group.
            proctree.kill(self._child_pid, number)

    def _set_cause(self, cause: str) -> None:
        """Later orders are harsher than earlier ones; none changes what a process died of before it."""
        if not self._exited:
            self._cause = cause

    def _kill_all(self, cause: str) -> None:
        self._set_cause(cause)
        self._clearing = True

    def _tell(self, message: dict[str, Any]) -> None:
        if self._lifeline is not None:
            self._unsent += wire.encode_line(message)

    def _flush(self) -> None:
        """Sends what the socket takes now; after the last word, closes."""
        if self._lifeline is None:
            return
        try:
            while self._unsent:
                del self._unsent[: self._lifeline.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._lose_owner()
            return
        if self._childless:
            self._lifeline.close()
            self._lifeline = None

    # -- the tree

    def _relay_reports(self) -> None:
        for report in self._reports.receive():
            message = self._without_secrets(report)
            if message["event"] == "error":
                self._error = {key: value for key, value in message.items() if key != "event"}
            self._tell(message)

    def _without_secrets(self, message: dict[str, Any]) -> dict[str, Any]:
        """An exception's text may repeat what the script was given: neither the record nor the owner is told that."""
        return {key: self._masker.text(value) if isinstance(value, str) else value for key, value in message.items()}

    def _reap(self) -> None:
        while not self._childless:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                self._tell({"event": "gone", "at": time.time()})
                return
            if pid == 0:
                return
            if pid == self._child_pid:
                self._record_exit(os.waitstatus_to_exitcode(status))

    def _record_exit(self, code: int) -> None:
        ended_at = time.time()
        self._relay_reports()
        self._exited = True
        self._deadline = math.inf
        self._clearing = True
        outcome = {
            "exit_code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "cause": self._cause,
        }
        trouble = self._write_record({**outcome, "ended_at": ended_at})
        self._tell({"event": "exited", **outcome, "at": ended_at, "record_error": trouble})
        self._flush()

    def _write_record(self, outcome: dict[str, Any]) -> str | None:
        """The exit record, durable when this returns None; otherwise what stood in the way."""
        if self._spawn.exit_record is None:
            return None
        record = {
            "version": RECORD_VERSION,
            "record": self._spawn.record,
            "pid": self._child_pid,
            "keeper_pid": os.getpid(),
            "started_at": self._started_at,
            **outcome,
        }
        trouble = None
        for said in (self._error, _shortened(self._error)):  # on a full disk there is room for a short one
            try:
                _write_durably(self._spawn.exit_record, json.dumps({**record, "error": said}).encode("ascii"))
            except OSError as error:
                trouble = f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror} ({self._spawn.exit_record})"
            else:
                return None
        sys.stderr.write(f"keeper {os.getpid()}: exit record not written: {trouble}\n")
        return trouble


def _open_room(room: str) -> int | None:
    """The file that was made for the record; None where there is none, or the script has put something else there."""
    try:
        handle = os.open(room, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None


def _noted(_number: int, _frame: object) -> None:
    """A signal's only effect is the byte that the interpreter writes to the wake-up socket."""


def _shortened(error: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if error is None else {**error, "message": error["message"][:_SHORT_CHARACTERS], "traceback": ""}


def _write_durably(path: str, data: bytes) -> None:
    """Whole or absent, and on the disk when this returns. Room that was made for it is used, and is not cut before."""
    room = path + _ROOM_SUFFIX
    handle = _open_room(room)
    if handle is None:
        room = f"{path}.{os.getpid()}.tmp"
        handle = os.open(room, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        at = 0
        while at < len(data):
            at += os.pwrite(handle, data[at:], at)
        os.ftruncate(handle, len(data))
        os.fsync(handle)
    finally:
        os.close(handle)
    os.rename(room, path)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
