"""Keepers and training processes forked ahead of their request: a restart then waits for one message, not for two forks.

Owns what happens between such a fork and its request. A spare keeper and its child have done all that needs no request
(session, parentage, the first writes to pages that every process writes to) and read from a socket, the child from its
keeper's, the keeper from the server's. A spare is nothing: it holds no lock, no descriptor of a job, no GPU. It ends
with its server, by the end of its socket; a child ends with its keeper, by its parent's death.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import time
from typing import TYPE_CHECKING, Any, NoReturn

from . import cgroups, keeper, linux, proctree, request, wire
from .program import interpreter, launch
from .reports import Reports

if TYPE_CHECKING:
    from collections.abc import Collection

    from .program.launch import Program
    from .warm import Baseline

MOST = 16
"""A spare, keeper and child, holds 10 MB of its own while it waits."""

QUIET_SECONDS = 1.0
"""Nothing is forked ahead this soon after a request: what it started has the processors to itself."""

UNUSED_SECONDS = 4.0
"""How long a spare outlives the need for it: a gang that failed is back before that."""

_APART_SECONDS = 0.05  # two forks in a row would be felt by who trains
_SEND_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 60.0


class Spares:
    """The server's side: the spares by their keepers' process numbers, and when there should be one more or less."""

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
        """The keepers that wait, or were told to end."""
        return self._channels.keys() | self._leaving

    def asked(self) -> None:
        """A request has come: it goes first."""
        self._asked_at = time.monotonic()

    def adjust(self, needed: int) -> bool:
        """Let go of the spares that have not been needed for a while; whether it is time to fork one more."""
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
        """When ``adjust`` could have something to do."""
        if min(needed, MOST) > len(self):
            return max(self._next_at() - time.monotonic(), _APART_SECONDS)
        return math.inf

    def _next_at(self) -> float:
        pause: float = min(QUIET_SECONDS * 2**self._lost, _LONGEST_PAUSE_SECONDS)
        return self._asked_at + pause

    def add(self, pid: int, channel: socket.socket) -> None:
        """``pid`` waits at the other end of ``channel``."""
        channel.settimeout(_SEND_SECONDS)
        self._channels[pid] = channel

    def hand_over(self, message: dict[str, Any], fds: list[int]) -> int | None:
        """Give a spare this request, whose descriptors stay open here; its process number, or None without a spare."""
        while self._channels:
            pid = next(iter(self._channels))
            channel = self._channels.pop(pid)
            try:
                _send(channel, message, fds)
            except OSError:
                proctree.kill(pid, signal.SIGKILL)  # dead already, or so stuck that it must not come to life later
                self._leaving.add(pid)
                continue
            finally:
                channel.close()
            self._lost = 0
            return pid
        return None

    def forget(self, pid: int) -> bool:
        """``pid`` has ended; whether it was a spare. What ends them may end the next one too: the pause grows."""
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
        """In a fork: let go of descriptors without closing them (`Server._abandon`)."""
        for channel in self._channels.values():
            channel.detach()
        self._channels.clear()

    def close(self) -> None:
        """Let all of them end."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


def wait_for_request(channel: int, baseline: Baseline) -> Program:
    """Called in a fresh fork with all signals blocked: becomes a spare. Returns in a training process alone."""
    keeper.settle({channel}, baseline)
    linux.set_title("orch-spare: keeper")
    reports = Reports()
    keeper_pid = os.getpid()
    above, below = socket.socketpair()
    group = cgroups.Group.create(cgroups.find_place())
    child_pid = os.fork()
    if child_pid != 0:
        below.close()
        _as_keeper(channel, above, reports, child_pid, None if group is None else keeper.moved(child_pid, group))
    above.close()
    os.close(channel)
    return _as_child(below, baseline, reports, keeper_pid)


def _as_keeper(
    channel: int, below: socket.socket, reports: Reports, child_pid: int, group: cgroups.Group | None
) -> NoReturn:
    received = _received_by_keeper(channel, child_pid)
    if received is None:
        _end_unused(child_pid, group)
    started_at = time.time()
    message, fds = received

    def begin() -> keeper.Keeper:
        """The child hears of its request when its lock file names it and its group has its limit."""
        kept = keeper.Keeper(request.parse(message, copies), reports, child_pid, started_at, group)
        _send(below, message, fds)
        below.close()
        os.close(channel)
        for descriptor in fds:
            os.close(descriptor)
        return kept

    copies = [os.dup(descriptor) for descriptor in fds]  # a keeper closes what its child alone needs
    keeper.run(begin)


def _end_unused(child_pid: int, group: cgroups.Group | None) -> NoReturn:
    proctree.kill(child_pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child_pid, 0)
    if group is not None:
        group.remove()
    os._exit(0)


def _as_child(channel: socket.socket, baseline: Baseline, reports: Reports, keeper_pid: int) -> Program:
    if not linux.die_with_parent(keeper_pid):
        os._exit(1)
    linux.set_title("orch-spare")
    interpreter.rehearse()
    received = _receive(channel)
    if received is None:
        os._exit(1)
    channel.detach()  # closed by its number, like everything else that the program is not to have
    return launch.launch(request.parse(*received), baseline, reports, keeper_pid)


def _received_by_keeper(channel: int, child_pid: int) -> tuple[dict[str, Any], list[int]] | None:
    """The request; None when there will be none, or no process to carry it out."""
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
    if sent < len(data):  # a reader that has all may be gone: even nothing cannot be sent to it
        channel.sendall(memoryview(data)[sent:])


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One whole request with its descriptors; None at the end of the stream."""
    reader = wire.RequestReader()
    message = None
    while message is None:
        try:
            message = reader.receive(channel)
        except EOFError:
            return None
    return message, reader.take_fds()
