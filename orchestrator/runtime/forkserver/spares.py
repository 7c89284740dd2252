"""Keepers and training processes forked before their request: a restart then waits for one message, not for two forks.

A spare keeper and its child have done everything that needs no request (session, parentage, the first writes to pages that
every process writes to) and read from a socket: the child from its keeper's, the keeper from the server's. A spare holds
no lock, no GPU and no descriptor of a job. It ends with its server, at the socket's end of file; a child ends with its
keeper, by the parent-death signal.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from . import cgroups, keeper, linux, proctree, request, wire
from .program import interpreter, launch
from .program.gate import Child, Gate
from .reports import Reports

if TYPE_CHECKING:
    from collections.abc import Collection

    from .program.launch import Program
    from .warm import Baseline

MOST = 16
"""Maximum number of spares. Each, a waiting keeper and its child, takes 10 MB of memory."""

QUIET_SECONDS = 1.0
"""Time after a request in which nothing is forked ahead: the processors are left to the process that it started."""

UNUSED_SECONDS = 4.0
"""Time that a spare is kept without need: a failed gang restarts within this time."""

_APART_SECONDS = 0.05  # two forks in a row would slow down training
_SEND_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 60.0


class Spares:
    """Server's side of the spares, by their keepers' process numbers; determines when to add or remove one."""

    def __init__(self) -> None:
        self._channels: dict[int, socket.socket] = {}
        self._leaving: set[int] = set()
        self._asked_at = time.monotonic()
        self._needed_at = time.monotonic()
        self._lost = 0

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def pids(self) -> Collection[int]:
        """Return the keepers that wait, or were asked to end."""
        return self._channels.keys() | self._leaving

    def asked(self) -> None:
        """Record a request, which has priority over forking ahead."""
        self._asked_at = time.monotonic()

    def adjust(self, needed: int) -> bool:
        """End the spares that have not been needed for a while; return whether to fork one more."""
        now = time.monotonic()
        needed = min(needed, MOST)
        if needed >= len(self):
            self._needed_at = now
        elif now - self._needed_at > UNUSED_SECONDS:
            for pid in list(self._channels)[needed:]:
                self._channels.pop(pid).close()
                self._leaving.add(pid)
        return needed > len(self) and now >= self._next_at()

    def look_again_seconds(self, needed: int) -> float:
        """Return the seconds until ``adjust`` may have to add a spare; infinite where it has none to add."""
        if min(needed, MOST) > len(self):
            return max(self._next_at() - time.monotonic(), _APART_SECONDS)
        return math.inf

    def _next_at(self) -> float:
        pause: float = min(QUIET_SECONDS * 2**self._lost, _LONGEST_PAUSE_SECONDS)
        return self._asked_at + pause

    def add(self, pid: int, channel: socket.socket) -> None:
        """Add the spare ``pid``, which waits at the other end of ``channel``."""
        channel.settimeout(_SEND_SECONDS)
        self._channels[pid] = channel

    def hand_over(self, message: dict[str, Any], fds: list[int]) -> int | None:
        """Send the request to a spare; return its process number, None without a spare. ``fds`` stay open here."""
        while self._channels:
            pid = next(iter(self._channels))
            channel = self._channels.pop(pid)
            try:
                _send(channel, message, fds)
            except OSError:
                proctree.kill(pid, signal.SIGKILL)  # already dead, or stuck: it must not start the request later
                self._leaving.add(pid)
                continue
            finally:
                channel.close()
            self._lost = 0
            return pid
        return None

    def forget(self, pid: int) -> bool:
        """Remove ``pid``; return whether it was a spare. The next spare may die of the same cause, so the pause grows."""
        if pid in self._leaving:
            self._leaving.discard(pid)
            return True
        channel = self._channels.pop(pid, None)
        if channel is None:
            return False
        channel.close()
        self._lost += 1
        self.asked()
        return True

    def abandon(self) -> None:
        """Detach the channels in a fork without closing them (`Server._abandon`)."""
        for channel in self._channels.values():
            channel.detach()
        self._channels.clear()

    def close(self) -> None:
        """Close all channels, which ends the spares."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


def wait_for_request(channel: int, baseline: Baseline) -> Program:
    """Become a spare, in a fresh fork with all signals blocked. Returns in a training process only."""
    keeper.settle({channel}, baseline)
    linux.set_title("orch-spare: keeper")
    reports, gate = Reports(), Gate()
    keeper_pid = os.getpid()
    above, below = socket.socketpair()
    group = cgroups.Group.create(cgroups.find_place())
    child_pid = os.fork()
    if child_pid != 0:
        below.close()
        gate.for_keeper()
        group = None if group is None else keeper.moved(child_pid, group)
        _as_keeper(channel, above, Child(child_pid, time.time(), reports, gate), group)
    above.close()
    os.close(channel)
    return _as_child(below, baseline, reports, keeper_pid, gate.for_child())


def _as_keeper(channel: int, below: socket.socket, child: Child, group: cgroups.Group | None) -> NoReturn:
    received = _received_by_keeper(channel, child.pid)
    if received is None:
        _end_unused(child.pid, group)
    child = replace(child, started_at=time.time())
    message, fds = received

    def begin() -> keeper.Keeper:
        """Start the child after its lock file names it and its group has its limit."""
        kept = keeper.Keeper(request.parse(message, copies), child, group)
        _send(below, message, fds)
        below.close()
        os.close(channel)
        for descriptor in fds:
            os.close(descriptor)
        return kept

    copies = [os.dup(descriptor) for descriptor in fds]  # a keeper closes its child's descriptors
    keeper.run(begin)


def _end_unused(child_pid: int, group: cgroups.Group | None) -> NoReturn:
    proctree.kill(child_pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child_pid, 0)
    if group is not None:
        group.remove()
    os._exit(0)


def _as_child(channel: socket.socket, baseline: Baseline, reports: Reports, keeper_pid: int, gate: int) -> Program:
    if not linux.die_with_parent(keeper_pid):
        os._exit(1)
    linux.set_title("orch-spare")
    interpreter.rehearse()
    received = _receive(channel)
    if received is None:
        os._exit(1)
    channel.detach()  # closed by its number, like all descriptors that the program must not have
    return launch.launch(request.parse(*received), baseline, reports, keeper_pid, gate)


def _received_by_keeper(channel: int, child_pid: int) -> tuple[dict[str, Any], list[int]] | None:
    """Return the request; None when there is none, or the child has ended."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    child = None
    with contextlib.suppress(OSError):  # before Linux 5.3: a dead child is then found when its program should run
        child = os.pidfd_open(child_pid)
        poll.register(child, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    if child is not None:
        os.close(child)
        if child in ready:
            return None
    with socket.socket(fileno=os.dup(channel)) as sock:
        return _receive(sock)


def _send(channel: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    data = wire.encode(message)
    sent = socket.send_fds(channel, [data], fds)
    if sent < len(data):  # a reader that has received everything may have closed the socket
        channel.sendall(memoryview(data)[sent:])


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one complete request with its descriptors; None at the end of the stream."""
    reader = wire.RequestReader()
    message = None
    while message is None:
        try:
            message = reader.receive(channel)
        except EOFError:
            return None
    return message, reader.take_fds()
