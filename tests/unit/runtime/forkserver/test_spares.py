"""Conditions under which the fork server forks ahead, and under which it releases a spare."""

from __future__ import annotations

import errno
import math
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from orchestrator.runtime.forkserver import serve, spares
from orchestrator.runtime.forkserver.spares import MOST, QUIET_SECONDS, UNUSED_SECONDS, Spares
from tests.support.work import descriptors_stay


class Clock:
    """A time that stands still until a test changes it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spares, "time", clock)
    return clock


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made: list[tuple[socket.socket, socket.socket]] = []
    yield made
    for pair in made:
        for sock in pair:
            sock.close()


def add(found: Spares, pairs: list[tuple[socket.socket, socket.socket]], *pids: int) -> None:
    for pid in pids:
        pairs.append(socket.socketpair())
        found.add(pid, pairs[-1][0])


def is_open(pair: tuple[socket.socket, socket.socket]) -> bool:
    """Return whether the server still holds its end."""
    pair[1].setblocking(False)
    try:
        return pair[1].recv(1) != b""
    except BlockingIOError:
        return True


def test_nothing_is_forked_soon_after_a_request(clock: Clock) -> None:
    found = Spares()
    clock.now += QUIET_SECONDS
    assert found.adjust(1)
    found.asked()
    clock.now += QUIET_SECONDS - 0.01
    assert not found.adjust(1)
    clock.now += 0.01
    assert found.adjust(1)


def test_the_server_looks_again_when_there_is_something_to_do(
    clock: Clock, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    found = Spares()
    assert found.look_again_seconds(0) == math.inf
    assert found.look_again_seconds(2) == QUIET_SECONDS
    clock.now += QUIET_SECONDS
    add(found, pairs, 1)
    assert 0 < found.look_again_seconds(2) < 0.1, "the others follow without another wait"
    add(found, pairs, 2)
    assert found.look_again_seconds(2) == math.inf


def test_as_many_as_could_be_needed_and_no_more(clock: Clock, pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    found = Spares()
    clock.now += QUIET_SECONDS
    for pid in range(MOST):
        assert found.adjust(MOST + 5)
        add(found, pairs, pid)
    assert not found.adjust(MOST + 5)
    assert set(found.pids) == set(range(MOST))


def test_one_that_nobody_needs_is_let_go_after_a_while(
    clock: Clock, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    """A failed gang needs no spare for a moment, and all of them right after."""
    found = Spares()
    add(found, pairs, 1, 2)
    assert not found.adjust(2)
    clock.now += UNUSED_SECONDS
    assert not found.adjust(0)
    assert [is_open(pair) for pair in pairs] == [True, True]
    clock.now += 0.01
    found.adjust(1)
    assert len(found) == 1
    assert [is_open(pair) for pair in pairs] == [True, False]
    assert set(found.pids) == {1, 2}, "no orphan, as long as it has not ended"
    assert found.forget(2)
    assert set(found.pids) == {1}
    assert found.look_again_seconds(2) <= QUIET_SECONDS, "it ended because it was told to"


def test_needed_again_in_time_it_stays(clock: Clock, pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    found = Spares()
    add(found, pairs, 1)
    for _ in range(3):
        clock.now += UNUSED_SECONDS - 0.01
        found.adjust(0)
        found.adjust(1)
    assert len(found) == 1


def test_a_request_goes_to_the_first_that_takes_it(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    found = Spares()
    assert found.hand_over({"mode": "script"}, []) is None
    add(found, pairs, 2**22 + 1, 2**22 + 2)  # above any process id
    pairs[0][1].close()
    assert found.hand_over({"mode": "script"}, []) == 2**22 + 2
    assert b"script" in pairs[1][1].recv(1000)
    assert len(found) == 0
    assert set(found.pids) == {2**22 + 1}, "killed, and not yet buried"


def test_a_server_that_cannot_fork_ahead_says_so_and_goes_on(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    server = object.__new__(serve.Server)
    server._spares = Spares()
    clock.now += QUIET_SECONDS
    assert server._spares.adjust(1)
    monkeypatch.setattr(serve.os, "fork", no_fork)
    with descriptors_stay():
        assert server._fork_ahead(None) is None  # type: ignore[arg-type]  # nothing is reached that would use it
    assert "forkserver.no_spare" in capfd.readouterr().err
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert not server._spares.adjust(1), "not again at once"
    clock.now += QUIET_SECONDS
    assert server._spares.adjust(1)


def test_one_that_ends_by_itself_is_replaced_ever_more_slowly(
    clock: Clock, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    found = Spares()
    clock.now += QUIET_SECONDS
    pauses = []
    for pid in range(8):
        assert found.adjust(1)
        add(found, pairs, pid)
        assert found.forget(pid)
        began = clock.now
        while not found.adjust(1):
            clock.now += 0.5
        pauses.append(clock.now - began)
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]
    add(found, pairs, 99)
    assert found.hand_over({"mode": "script"}, []) == 99
    clock.now += QUIET_SECONDS
    assert found.adjust(1), "one that served ends the suspicion"


def test_a_kernel_that_cannot_tell_of_a_childs_death_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_call(_pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", no_such_call)
    server, keeper = socket.socketpair()
    with server, keeper:
        spares._send(server, {"mode": "store"}, [])
        assert spares._received_by_keeper(keeper.fileno(), os.getpid()) == ({"mode": "store"}, [])
        server.close()
        assert spares._received_by_keeper(keeper.fileno(), os.getpid()) is None


def test_one_that_ended_is_forgotten(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    found = Spares()
    add(found, pairs, 1, 2)
    assert found.forget(1)
    assert not found.forget(1)
    assert not found.forget(99)
    assert set(found.pids) == {2}
    found.close()
    assert [is_open(pair) for pair in pairs] == [False, False]
