"""The owner's end of a lifeline, against a keeper that is simulated by a socket."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core.codec import misfits
from orchestrator.runtime.forkserver import wire
from orchestrator.runtime.spawn.client import (
    ErrorRaised,
    Event,
    Exited,
    ExitRecordError,
    ForkServerError,
    ForkServerVersionError,
    Gone,
    KeeperLost,
    Lifeline,
    Started,
    read_exit_record,
)

STARTED = {"event": "started", "pid": 7, "cold": None, "at": 1.0}
EXITED = {"event": "exited", "exit_code": 0, "signal": None, "cause": None, "record_error": None, "at": 2.0}
JSON = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)
GONE = {"event": "gone", "at": 3.0}


@pytest.fixture
def ends() -> Iterator[tuple[Lifeline, socket.socket]]:
    ours, theirs = socket.socketpair()
    lifeline = Lifeline(ours)
    with theirs:
        yield lifeline, theirs
    lifeline.close()


def tell(keeper: socket.socket, *messages: dict[str, object]) -> None:
    keeper.sendall(b"".join(wire.encode_line(message) for message in messages))


async def collect(lifeline: Lifeline) -> list[Event]:
    async with asyncio.timeout(300):
        return [event async for event in lifeline]


def test_events_until_the_last(ends: tuple[Lifeline, socket.socket]) -> None:
    lifeline, keeper = ends
    tell(keeper, STARTED, {"event": "error", "type": "E", "message": "m", "traceback": "t", "at": 1.5}, EXITED, GONE)
    expected = [
        Started(pid=7, cold=None, at=1.0),
        ErrorRaised(type="E", message="m", traceback="t", at=1.5),
        Exited(exit_code=0, signal=None, cause=None, record_error=None, at=2.0),
        Gone(at=3.0),
    ]
    assert asyncio.run(collect(lifeline)) == expected
    assert asyncio.run(lifeline.next_event()) is None


def test_keeper_that_hangs_up_too_early_is_lost(ends: tuple[Lifeline, socket.socket]) -> None:
    lifeline, keeper = ends
    tell(keeper, STARTED)
    keeper.close()
    events = asyncio.run(collect(lifeline))
    assert [type(event) for event in events] == [Started, KeeperLost]
    assert not lifeline.kill()


def test_cancelled_reader_loses_nothing(ends: tuple[Lifeline, socket.socket]) -> None:
    lifeline, keeper = ends

    async def run() -> None:
        for _ in range(20):
            reader = asyncio.ensure_future(lifeline.next_event())
            await asyncio.sleep(0)
            tell(keeper, STARTED)
            await asyncio.sleep(0)
            reader.cancel()
            got = (await asyncio.gather(reader, return_exceptions=True))[0]
            if isinstance(got, asyncio.CancelledError):
                async with asyncio.timeout(300):
                    got = await lifeline.next_event()
            assert got == Started(pid=7, cold=None, at=1.0)

    asyncio.run(run())


def test_closing_wakes_the_reader(ends: tuple[Lifeline, socket.socket]) -> None:
    lifeline, _ = ends

    async def run() -> None:
        reader = asyncio.ensure_future(lifeline.next_event())
        while lifeline._waiting is None:  # noqa: ASYNC110  (the task has to come to waiting)
            await asyncio.sleep(0)
        lifeline.close()
        async with asyncio.timeout(300):
            assert await reader is None
            assert await lifeline.next_event() is None

    asyncio.run(run())


def test_orders(ends: tuple[Lifeline, socket.socket]) -> None:
    lifeline, keeper = ends
    assert lifeline.signal(15)
    assert lifeline.stop(timedelta(minutes=1))
    assert lifeline.kill()
    orders = [json.loads(line) for line in keeper.recv(65536).splitlines()]
    assert orders == [{"cmd": "signal", "signal": 15}, {"cmd": "stop", "grace_seconds": 60.0}, {"cmd": "kill"}]


def test_exit_records(tmp_path: Path) -> None:
    path = tmp_path / "exit.json"
    assert read_exit_record(path) is None
    fields = {"record": {"rank": 1}, "pid": 2, "keeper_pid": 3, "started_at": 4.0, "ended_at": 5.0}
    fields |= {"exit_code": None, "signal": 9, "cause": "kill"}
    error = {"type": "E", "message": "m", "traceback": "t", "at": 4.5}
    path.write_text(json.dumps({"version": 1, **fields, "error": error}))
    record = read_exit_record(path)
    assert record is not None
    assert (record.record, record.signal, record.cause, record.error) == ({"rank": 1}, 9, "kill", ErrorRaised(**error))
    path.write_text(json.dumps({"version": 2, **fields}))
    with pytest.raises(ForkServerVersionError, match="another version of orch"):
        read_exit_record(path)


@pytest.mark.parametrize(
    "line",
    [
        b"[]\n",
        b"{\n",
        b"\xff\n",
        b'{"event": "exited"}\n',
        b'{"event": ["gone"]}\n',
        b'{"event": "gone", "at": 1e999}\n',
        b'{"event": "started", "pid": "x", "cold": null, "at": 1.0}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_keeper_that_sends_something_else_is_left_out_or_lost(
    ends: tuple[Lifeline, socket.socket], line: bytes
) -> None:
    lifeline, keeper = ends
    keeper.sendall(line)
    keeper.shutdown(socket.SHUT_WR)
    assert [type(event) for event in asyncio.run(collect(lifeline))] == [KeeperLost]


RECORD = {"version": 1, "record": {}, "pid": 1, "keeper_pid": 2, "started_at": 1.0, "ended_at": 2.0, "exit_code": 3}
RECORD |= {"signal": None, "cause": None, "error": None}


@pytest.mark.parametrize(
    "change",
    [
        {"exit_code": "3"},
        {"exit_code": 10**30},
        {"exit_code": None},
        {"signal": 9},
        {"exit_code": None, "signal": 1000},
        {"ended_at": math.inf},
        {"ended_at": [2.0]},
        {"error": "boom"},
        {"error": {"type": 1}},
        {"record": []},
    ],
)
def test_a_record_with_a_value_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "exit.json"
    path.write_text(json.dumps({**RECORD, **change}))
    with pytest.raises(ExitRecordError, match="out of range"):
        read_exit_record(path)


def test_a_record_that_is_no_file_or_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "exit.json"
    os.mkfifo(path)
    with pytest.raises(ExitRecordError, match="not a regular file"):
        read_exit_record(path)
    path.unlink()
    path.touch()
    os.truncate(path, 2**40)  # a sparse file of a terabyte
    with pytest.raises(ExitRecordError, match="more than"):
        read_exit_record(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    raw=st.binary(max_size=200)
    | st.dictionaries(st.sampled_from(sorted(RECORD)), JSON).map(lambda v: json.dumps({**RECORD, **v}).encode())
)
def test_a_record_of_any_bytes_is_read_or_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "any.json").write_bytes(raw)
    try:
        record = read_exit_record(tmp_path / "any.json")
    except ForkServerError:
        return
    assert record is not None
    assert misfits(record) == ()
