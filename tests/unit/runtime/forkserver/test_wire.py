"""Messages of the fork server and reports of its processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.runtime.forkserver import wire
from orchestrator.runtime.forkserver.reports import Reports, clip

TEXTS = st.text(st.characters(codec=None), max_size=20)  # surrogates included: an environment is bytes
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
MESSAGES = st.dictionaries(TEXTS, JSON, max_size=4)


@settings(deadline=None)
@given(MESSAGES)
def test_round_trip(message: dict[str, object]) -> None:
    data = wire.encode(message)
    length = wire.body_length(data[: wire.HEADER.size])
    assert length == len(data) - wire.HEADER.size
    assert wire.decode(data[wire.HEADER.size :]) == message


@settings(deadline=None)
@given(st.lists(MESSAGES, max_size=4), st.integers(1, 7))
def test_lines_survive_any_cutting(messages: list[dict[str, object]], size: int) -> None:
    data = b"".join(wire.encode_line(message) for message in messages)
    reader = wire.LineReader()
    found = [message for start in range(0, len(data), size) for message in reader.feed(data[start : start + size])]
    assert found == messages


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"1", b"\xff"])
def test_what_is_no_message_is_an_error(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(body)


def test_a_request_is_put_together_from_pieces_with_its_descriptors() -> None:
    message = {"mode": "script", "env": {"A": "x" * 1000}}
    data = wire.encode(message)
    here, there = socket.socketpair()
    reader = wire.RequestReader()
    with here, there, open(os.devnull, "rb") as file:
        socket.send_fds(here, [data[:2]], [file.fileno()])
        assert reader.receive(there) is None
        here.sendall(data[2:50])
        assert reader.receive(there) is None
        here.sendall(data[50:])
        assert reader.receive(there) == message
        (fd,) = reader.take_fds()
        assert os.readlink(f"/proc/self/fd/{fd}") == os.devnull
        os.close(fd)
        assert reader.take_fds() == []
        here.close()
        with pytest.raises(EOFError):
            reader.receive(there)


STARTED = {"event": "started", "pid": 7, "cold": None, "at": 1.5}
ERROR = {"event": "error", "type": "E", "message": "grüß \udcff", "traceback": "t", "missing_file": "", "at": 2}


@pytest.fixture(autouse=True)
def woken() -> Iterator[list[int]]:
    """Yield the signals that have woken the keeper, which is this process."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGUSR1, before)


def in_child(reports: Reports, *messages: dict[str, object], attach: bool = True) -> None:
    pid = os.fork()
    if pid == 0:
        if attach:
            reports.attach_writer()
        for message in messages:
            reports.send(message)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_messages_arrive_in_order_and_once(woken: list[int]) -> None:
    reports = Reports()
    assert reports.receive() == []
    in_child(reports, STARTED, ERROR)
    assert reports.receive() == [STARTED, ERROR]
    assert reports.receive() == []
    assert woken


def test_processes_that_merely_inherited_it_say_nothing(woken: list[int]) -> None:
    reports = Reports()
    in_child(reports, ERROR, attach=False)
    assert (reports.receive(), woken) == ([], [])


def test_what_does_not_fit_is_dropped_and_the_rest_kept() -> None:
    reports = Reports()
    in_child(reports, STARTED, {"n": "x" * 300_000}, ERROR)
    assert reports.receive() == [STARTED, ERROR]


def test_clip_keeps_both_ends() -> None:
    assert clip("short", 10) == "short"
    cut = clip("a" * 100 + "b" * 100, 40)
    assert cut.startswith("a" * 10)
    assert cut.endswith("b" * 30)
    assert "160 characters left out" in cut


def forge(reports: Reports, raw: bytes) -> None:
    """Write to the memory as a script could that finds it."""
    memory = reports._memory
    begin = reports._read
    memory[begin : begin + len(raw)] = raw
    memory[0:4] = (begin + len(raw)).to_bytes(4, sys.byteorder)


@pytest.mark.parametrize(
    "message",
    [
        {"event": "gone", "at": 1.0},
        {"event": "exited", "exit_code": 0, "signal": None, "cause": None, "record_error": None, "at": 1.0},
        {"event": "started", "pid": "7", "cold": None, "at": 1.0},
        {"event": "error", "type": "E", "message": ["m"], "traceback": "t", "at": 1.0},
        {"event": "error", "type": "E", "message": "m" * 20_000, "traceback": "t", "at": 1.0},
        {"event": ["started"]},
        {},
    ],
)
def test_what_only_a_keeper_may_say_is_not_passed_on(message: dict[str, object]) -> None:
    reports = Reports()
    forge(reports, json.dumps(message).encode() + b"\n" + json.dumps({**STARTED, "more": 1}).encode() + b"\n")
    assert reports.receive() == [STARTED]


@given(st.binary(max_size=500), st.integers(0, 2**32 - 1))
def test_a_keeper_survives_whatever_its_child_writes(raw: bytes, length: int) -> None:
    reports = Reports()
    forge(reports, raw)
    reports.receive()
    reports._memory[0:4] = length.to_bytes(4, sys.byteorder)
    reports.receive()
