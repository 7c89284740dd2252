"""K: parent and reaper of one training process, which it also kills when required.

Owns that process's exit record and its whole tree. Forked from the fork server per request, single-threaded, driven by
three things alone: signals (SIGCHLD, SIGUSR1 from the child's reports), the lifeline, and at most one deadline.

It also owns the tree's control group, where there can be one, and the record in the rank's lock file (holder.py). With
either, other programs can end the tree if the keeper is killed.

The order of steps at a death matters: reap, write the exit record durably, notify the owner, kill what is left, report that
all has ended. The lifeline never blocks the keeper: unread messages wait in memory, so a frozen owner cannot delay a
deadline. End of file on the lifeline is an order to kill everything.

One exception: when the machine shuts down, every process gets SIGTERM, keeper and owner included, and the owner ends long
before a rank has saved. A rank that was asked to stop a moment ago may then end by itself until `STOP_SECONDS` after
the request; the keeper reads its output meanwhile. The signals are sent one after the other, so the owner may end
before the keeper gets its own: the keeper waits `ASKED_SECONDS` for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from . import cgroups, holder, linux, wire
from .launch import Child, Gate, Program, launch
from .masking import Masker
from .reports import Reports, read_last_page

if TYPE_CHECKING:
    from .warm import Baseline
    from .wire import Spawn

RECORD_VERSION = 1

# The keeper sweeps again at each death of a process; this bounds how long a process lives that a sweep has missed.
_SWEEP_SECONDS = 0.05
_SLOWEST_SWEEP_SECONDS = 1.0
_READ_BYTES = 65536

# Created by the owner beforehand, so that an end can be recorded even if the disk fills up meanwhile.
_ROOM_SUFFIX = ".room"
_SHORT_CHARACTERS = 200

STOP_SECONDS = 10.0
"""Time that a rank that was asked to stop may outlive its owner: less than the lease of a lost node's ranks."""
ASKED_SECONDS = 0.2
"""Time after its owner's end in which a keeper may still get the SIGTERM that ended it: the sender may have to wait for a CPU."""


def keep(spawn: Spawn, baseline: Baseline) -> Program:
    """Run the keeper in a fresh fork with all signals blocked. Returns in the training process only, with what it runs."""
    os.setsid()
    linux.become_subreaper()
    linux.close_all_but({0, 1, 2} | spawn.descriptors() | set(baseline.descriptors))
    reports, gate = Reports(), Gate()
    keeper_pid = os.getpid()
    started_at = time.time()
    group = None if spawn.lease is None else cgroups.Group.create(cgroups.find_place())
    child_pid = os.fork()
    if child_pid != 0:
        gate.for_keeper()
        if group is not None:
            # The move may take the kernel 15 ms; meanwhile the child prepares itself and waits at the gate.
            group = _moved(child_pid, group)
        _run(spawn, Child(child_pid, started_at, reports, gate), group)
    return launch(spawn, baseline, reports, keeper_pid, gate.for_child())


def _moved(child_pid: int, group: cgroups.Group) -> cgroups.Group | None:
    """Move the child into the group and return the group; None where the kernel refuses."""
    if group.join(child_pid):
        return group
    group.remove()
    return None


def _run(spawn: Spawn, child: Child, group: cgroups.Group | None) -> NoReturn:
    """Run the keeper and end the process in every case; the child's parent-death signal then ends the tree."""
    code = 1
    try:
        Keeper(spawn, child, group).run()
        code = 0
    except BaseException:
        sys.stderr.write(f"keeper {os.getpid()}: {traceback.format_exc()}")
    finally:
        os._exit(code)


class Keeper:
    """State of a keeper, from the fork until the last process of its tree has ended.

    The child waits at its gate until the owner sends `go`, which it does once it has the reply to its request.
    """

    def __init__(self, spawn: Spawn, child: Child, group: cgroups.Group | None = None) -> None:
        self._spawn = spawn
        self._group = group
        self._memory: dict[str, Any] | None = None
        self._child = child
        self._masker = Masker(spawn.secrets)
        self._error: dict[str, Any] | None = None
        self._cause: str | None = None
        self._deadline = Deadline()
        self._terminated_at: float | None = None  # by the monotonic clock
        self._exited = False
        self._childless = False
        self._clearing = False
        self._sweep_seconds = _SWEEP_SECONDS
        self._lifeline: socket.socket | None = socket.socket(fileno=spawn.lifeline)
        self._lifeline.setblocking(False)
        self._lines = wire.LineReader()
        self._unsent = bytearray()
        self._pipes = [end for end in map(linux.read_end, {spawn.stdout, spawn.stderr}) if end is not None]
        self._wake = self._take_signals()
        self._note_holder()
        if group is not None and spawn.memory_bytes is not None:
            group.limit_memory(spawn.memory_bytes)

    def _note_holder(self) -> None:
        """Record in the lock file what must be ended if this process is killed."""
        if self._spawn.lease is None:
            return
        keeper, child = holder.identity_of(os.getpid()), holder.identity_of(self._child.pid)
        if keeper is None or child is None:
            return  # the child is already dead, and no other process was started
        try:
            holder.write(
                self._spawn.lease, holder.Holder(keeper, child, None if self._group is None else self._group.path)
            )
        except OSError as error:  # a full disk: the tree can then be found only by its mark
            sys.stderr.write(f"keeper {os.getpid()}: lock file not written: {error}\n")

    def _take_signals(self) -> socket.socket:
        """Turn signals into bytes on a socket. Requests to end are only recorded: a keeper ends when its tree has ended."""
        linux.set_process_name("orch-keeper")
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTSTP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # drops one that was pending before there was a rank
        signal.signal(signal.SIGTERM, self._on_terminate)
        for number in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, _noted)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        # Open copies of the child's descriptors would keep their readers from seeing end of file.
        for descriptor in self._spawn.descriptors() - {self._spawn.lifeline, self._spawn.lease}:
            os.close(descriptor)
        linux.unblock_signals()
        return reader

    def _on_terminate(self, _number: int, _frame: object) -> None:
        if self._terminated_at is None:
            self._terminated_at = time.monotonic()

    def run(self) -> None:
        """Return when no process is left below this one and the owner has been notified or has closed the lifeline."""
        while not (self._childless and self._lifeline is None):
            self._wait()
            self._relay_reports()
            self._reap()
            if self._deadline.seconds() <= 0.0:
                self._overdue()
            if self._clearing and not self._childless:
                linux.kill_sweep(os.getpid())
                if self._group is not None and self._exited:
                    self._group.kill()
                self._reap()
            self._flush()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._lifeline is not None:
            poll.register(self._lifeline, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        else:
            for pipe in self._pipes:
                poll.register(pipe, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(self._timeout_milliseconds())}
        if self._wake.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(_READ_BYTES)
        if self._lifeline is not None and self._lifeline.fileno() in ready:
            self._read_lifeline()
        for pipe in ready.intersection(self._pipes):
            if not linux.drop_output(pipe):
                self._pipes.remove(pipe)

    def _timeout_milliseconds(self) -> float | None:
        seconds = self._deadline.seconds()
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
        if self._exited or self._clearing or self._cause is not None:
            self._kill_all("lifeline")
            return
        left = self._seconds_to_stop()
        self._deadline.move(left or ASKED_SECONDS, "lifeline", provisional=left == 0.0)

    def _overdue(self) -> None:
        """Kill the rank; at a provisional deadline, first check whether it has been asked to stop in the meantime."""
        left = self._seconds_to_stop() if self._deadline.provisional else 0.0
        if left > 0.0:
            self._deadline.move(left, self._deadline.cause)
        else:
            self._deadline.clear()
            self._kill_all(self._deadline.cause)

    def _seconds_to_stop(self) -> float:
        """Return the seconds that the rank may still take to end; 0 unless it was asked to stop, not by its owner."""
        now = time.time()
        asked = read_last_page(self._spawn.page, now=now).stop_seen_at
        times = [at for at in (self._terminated_by(now), self._child.reports.terminated_at, asked) if at is not None]
        return min(STOP_SECONDS, STOP_SECONDS - (now - min(times))) if times else 0.0

    def _terminated_by(self, now: float) -> float | None:
        """Return when the keeper got SIGTERM, by the present wall clock: no step of it changes the time since then."""
        return None if self._terminated_at is None else now - (time.monotonic() - self._terminated_at)

    def _obey(self, command: dict[str, Any]) -> None:
        self._reap()  # a process that has ended before an order did not end because of it
        match command["cmd"]:
            case "go":
                self._child.gate.open()
            case "signal":
                self._signal_group(int(command["signal"]))
            case "stop":
                self._deadline.at_most(float(command["grace_seconds"]))
                self._set_cause("stop")
                self._signal_group(signal.SIGTERM)
                self._signal_group(signal.SIGCONT)  # a stopped process handles SIGTERM only once it is continued
            case "kill":
                self._kill_all("kill")
            case other:
                raise ValueError(f"unknown command {other!r}")

    def _signal_group(self, number: int) -> None:
        if self._exited:
            return
        try:
            os.killpg(self._child.pid, number)
        except ProcessLookupError:
            # Forked, but not yet the leader of its own group.
            linux.kill(self._child.pid, number)

    def _set_cause(self, cause: str) -> None:
        """Record the cause of an order in place of an earlier one, unless the process has exited."""
        if not self._exited:
            self._cause = cause

    def _kill_all(self, cause: str) -> None:
        self._set_cause(cause)
        self._clearing = True

    def _queue_message(self, message: dict[str, Any]) -> None:
        if self._lifeline is not None:
            self._unsent += wire.encode_line(message)

    def _flush(self) -> None:
        """Send what the socket takes now; close it after the last message."""
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
        for report in self._received():
            if report.get("event") == "started":
                report["pid"] = self._child.pid
            elif report.get("event") != "error":
                continue  # the child can write anything into the shared memory
            message = self._without_secrets(report)
            if message["event"] == "error":
                self._error = {key: value for key, value in message.items() if key != "event"}
            elif message["event"] == "started":
                message["pid"] = self._child.pid  # from the fork: a script could name another process
            self._queue_message(message)

    def _received(self) -> list[dict[str, Any]]:
        try:
            return self._child.reports.receive()
        except (wire.WireError, struct.error) as error:
            sys.stderr.write(f"keeper {os.getpid()}: a report of the child was left out: {error}\n")
            return []

    def _without_secrets(self, message: dict[str, Any]) -> dict[str, Any]:
        """Mask secrets in an exception's text before it goes to the record or the owner: it may quote the script's input."""
        return {key: self._masker.text(value) if isinstance(value, str) else value for key, value in message.items()}

    def _reap(self) -> None:
        while not self._childless:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                if self._group is not None and not self._group.remove():
                    return  # processes that are no descendants any more: the next sweep ends them
                self._release_lock()
                self._childless = True
                self._queue_message({"event": "gone", "at": time.time()})
                return
            if pid == 0:
                return
            if pid == self._child.pid:
                self._memory = self._memory_used(usage.ru_maxrss * 1024)
                self._record_exit(os.waitstatus_to_exitcode(status))

    def _release_lock(self) -> None:
        """Release the rank's lock: no process is left, so the next tree may start before this process ends."""
        if self._spawn.lease is not None:
            holder.clear(self._spawn.lease)
            fcntl.flock(self._spawn.lease, fcntl.LOCK_UN)

    def _memory_used(self, max_rss_bytes: int) -> dict[str, Any]:
        """Return the process's peak memory and what its group counted: the kernel has freed all of it by now."""
        usage = None if self._group is None else self._group.usage()
        return {
            "max_rss_bytes": max_rss_bytes,
            "peak_bytes": usage.peak_bytes if usage else None,
            "limit_bytes": usage.limit_bytes if usage else None,
            "kills": usage.kills if usage else 0,
        }

    def _record_exit(self, code: int) -> None:
        ended_at = time.time()
        self._relay_reports()
        self._exited = True
        self._deadline.clear()
        self._clearing = True
        outcome = {
            "exit_code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "cause": self._cause,
        }
        ending = self._ending(ended_at)
        trouble = self._write_record({**outcome, "ending": ending, "ended_at": ended_at})
        self._queue_message(
            {
                "event": "exited",
                **outcome,
                "at": ended_at,
                "record_error": trouble,
                "ending": ending,
                "memory": self._memory,
            }
        )
        self._flush()

    def _ending(self, now: float) -> dict[str, Any]:
        """Return the times at which the process and the keeper were asked to stop, and the process's last steps."""
        last = read_last_page(self._spawn.page, now=now)
        seen = [at for at in (last.stop_seen_at, self._child.reports.terminated_at) if at is not None]
        return {
            "stop_seen_at": min(seen, default=None),
            "keeper_terminated_at": self._terminated_by(now),
            "last_step": last.last_step,
            "total_steps": last.total_steps,
        }

    def _write_record(self, outcome: dict[str, Any]) -> str | None:
        """Write the exit record durably; return None, or the reason of the failure."""
        if self._spawn.exit_record is None:
            return None
        record = {
            "version": RECORD_VERSION,
            "record": self._spawn.record,
            "pid": self._child.pid,
            "keeper_pid": os.getpid(),
            "started_at": self._child.started_at,
            **outcome,
            "memory": self._memory,
        }
        trouble = None
        for error_text in (self._error, _shortened(self._error)):  # a full disk may have room for a short one
            try:
                _write_durably(self._spawn.exit_record, json.dumps({**record, "error": error_text}).encode("ascii"))
            except OSError as error:
                trouble = f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror} ({self._spawn.exit_record})"
            else:
                return None
        sys.stderr.write(f"keeper {os.getpid()}: exit record not written: {trouble}\n")
        return trouble


def _open_room(room: str) -> int | None:
    """Open the file preallocated for the record; None where it is missing or the script has replaced it."""
    try:
        handle = os.open(room, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None


def _noted(_number: int, _frame: object) -> None:
    """Do nothing: a signal's only effect is the byte that the interpreter writes to the wake-up socket."""


def _shortened(error: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if error is None else {**error, "message": error["message"][:_SHORT_CHARACTERS], "traceback": ""}


def _write_durably(path: str, data: bytes) -> None:
    """Write the file atomically and durably. A preallocated file is used and not truncated first."""
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


class Deadline:
    """Time at which a rank is killed, and the ``cause`` that its exit record then contains; at first there is none.

    ``provisional``: at that time the keeper first checks whether the rank has been asked to stop and may run longer.
    """

    def __init__(self) -> None:
        self._at = math.inf  # by the monotonic clock
        self.cause = "stop_deadline"
        self.provisional = False

    def seconds(self) -> float:
        """Return the seconds until the deadline; infinite where there is none."""
        return self._at - time.monotonic()

    def at_most(self, seconds: float) -> None:
        """Move the deadline to ``seconds`` from now, if it is later."""
        self._at = min(self._at, time.monotonic() + seconds)

    def move(self, seconds: float, cause: str, *, provisional: bool = False) -> None:
        """Set the deadline to ``seconds`` from now."""
        self._at, self.cause, self.provisional = time.monotonic() + seconds, cause, provisional

    def clear(self) -> None:
        """Remove the deadline."""
        self._at = math.inf
