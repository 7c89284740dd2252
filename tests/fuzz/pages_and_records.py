"""Readers of data written by a rank's process or its keeper: progress page, exit record, lifeline, requests, logs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from msgspec import structs

from orchestrator.core.codec import LATEST_TIME, misfits, to_plain
from orchestrator.core.events import RankExited
from orchestrator.core.facts.faults import ActorLost
from orchestrator.runtime.forkserver import wire
from orchestrator.runtime.forkserver.reports import Reports
from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.gangs.job_files import LogMirror
from orchestrator.runtime.gangs.relay import recorded_exits
from orchestrator.runtime.nodes.files import LogLocation, LogPart
from orchestrator.runtime.ranks.logs import LogLimits, LogReader, LogWriter, log_path
from orchestrator.runtime.spawn.client import Event, Gone, KeeperLost, Lifeline
from orchestrator.spec.settings import Settings
from orchestrator.train.script import progress as layout
from orchestrator.train.script.progress import ProgressPage, ProgressPageError
from orchestrator.train.script.progress_reading import PageReader, snapshot_of
from tests.fuzz.reader import Reader

PATIENCE = timedelta(seconds=60)
JOB = "digits-abc234"


# -- the progress page


def _page() -> bytes:
    """Return a page that a script has written."""
    with tempfile.TemporaryDirectory() as place:
        reader = PageReader.create(Path(place) / "page")
        script = ProgressPage.open(reader.path)
        script.write(step=3, total_steps=60, epoch=0.5, metrics={"loss": 0.25, "lr": 1e-3})
        script.write_saved(0.5, snapshot_step=3)
        script.write_facts({"saved_step": 3, "saved_at": 1.7e9, "saved_path": "/x/step-3", "quarantined": ("torn",)})
        script.close()
        reader.close()
        return reader.path.read_bytes()


def _read_page(data: bytes) -> bool:
    page = data[: layout.PAGE_BYTES].ljust(layout.PAGE_BYTES, b"\0")
    try:
        found = snapshot_of(lambda: page)
    except ProgressPageError:
        return False
    assert misfits(structs.replace(found, metrics={})) == (), found  # a metric may be NaN, which equals nothing
    json.dumps({k: v for k, v in to_plain(found).items() if k != "metrics"}, allow_nan=False).encode()
    return not found.unusable


def _record_of(slots: layout.Slots) -> list[bytes]:
    page = _page()
    found = slots.newest(lambda: page)
    assert found is not None
    return [found]


def _read_record(slots: layout.Slots) -> Any:
    """Return a reader of a page that contains the record, with the right checksum."""

    def read(data: bytes) -> bool:
        page = bytearray(_BLANK)
        slots.publish(page, slots.last_counter(page) + 1, data[: slots.capacity])  # type: ignore[arg-type]  # bytes do
        return _read_page(bytes(page))

    return read


_BLANK = _page()


# -- exit records


def _exit_records() -> list[bytes]:
    plain = {
        "version": 1,
        "record": {"job": JOB},
        "pid": 12,
        "keeper_pid": 11,
        "started_at": 1.7e9,
        "ended_at": 1.7e9 + 1,
        "exit_code": 1,
        "signal": None,
        "cause": None,
        "error": {"type": "ValueError", "message": "no", "traceback": "…", "at": 1.7e9, "missing_file": "a.csv"},
        "ending": {"stop_seen_at": None, "keeper_terminated_at": None, "last_step": 5, "total_steps": 60},
        "memory": {"max_rss_bytes": 2**30, "peak_bytes": 2**30, "limit_bytes": 2**31, "kills": 1},
    }
    return [json.dumps(body).encode() for body in (plain, {**plain, "exit_code": None, "signal": 9, "error": None})]


def _read_exit_record(data: bytes) -> bool:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        paths = Settings.from_environ({"ORCH_HOME": home}).paths
        path = Path(paths.exit_record(JOB, 1, 0))  # type: ignore[arg-type]  # an id
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        told = recorded_exits(paths, JOB, 1, 1, GangLostError(ActorLost()))  # type: ignore[arg-type]  # an id
    ends = [event.exit for event in told if isinstance(event, RankExited)]
    assert [end for end in ends if misfits(end)] == []
    return bool(ends)


# -- messages on sockets


def _fed(data: bytes) -> socket.socket:
    """Return a socket that yields the data and then ends."""
    mine, other = socket.socketpair()
    other.setblocking(False)
    with other:
        other.send(data[:60_000])
    return mine


def _messages() -> list[bytes]:
    return [
        wire.encode({"op": "ping"}),
        wire.encode({"op": "spawn", "fds": [], "env": {"A": "b"}}) + wire.encode({"op": "x"}),
    ]


def _read_messages(data: bytes) -> bool:
    if not data:
        return False
    reader, found = wire.RequestReader(), False
    with _fed(data) as sock:
        try:
            while True:
                found |= reader.receive(sock) is not None
        except (wire.WireError, EOFError):
            return found


def _requests() -> list[bytes]:
    spawn = wire.SpawnRequest(
        mode="script",
        target="a.py",
        args=["-x"],
        cwd="/tmp",
        env={"A": "b"},
        threads=2,
        record={"job": JOB},
        secrets=["s"],
        umask=0o22,
    )
    message, _ = spawn.message({"stdout": 0, "stderr": 1, "lifeline": 2, "lease": 3})
    return [json.dumps(message).encode()]


def _read_request(data: bytes) -> bool:
    try:
        message = wire.decode(data)
        roles = message.get("fds")
        wire.parse(message, list(range(len(roles) if isinstance(roles, list) else 0)))
    except (wire.WireError, wire.BadRequestError):
        return False
    return True


def _lifeline() -> list[bytes]:
    lines: list[dict[str, Any]] = [
        {"event": "started", "pid": 12, "cold": None, "at": 1.7e9},
        {"event": "error", "type": "E", "message": "m", "traceback": "t", "at": 1.7e9, "missing_file": ""},
        {
            "event": "exited",
            "exit_code": 1,
            "signal": None,
            "cause": None,
            "record_error": None,
            "at": 1.7e9,
            "memory": {"max_rss_bytes": 5, "peak_bytes": None, "limit_bytes": None, "kills": 0},
            "ending": {"stop_seen_at": None, "keeper_terminated_at": None, "last_step": 1, "total_steps": 2},
        },
        {"event": "gone", "at": 1.7e9},
    ]
    return [b"".join(map(wire.encode_line, lines))]


async def _events(lifeline: Lifeline) -> list[Event]:
    try:
        async with asyncio.timeout(PATIENCE.total_seconds()):
            return [event async for event in lifeline]
    finally:
        lifeline.close()


def _read_lifeline(data: bytes) -> bool:
    found = asyncio.run(_events(Lifeline(_fed(data))))
    assert all(misfits(event) == () for event in found), found
    assert isinstance(found[-1], Gone | KeeperLost), found
    return isinstance(found[-1], Gone)


def _reports() -> list[bytes]:
    body = b"".join(
        wire.encode_line(line)
        for line in (
            {"event": "started", "pid": 1, "cold": None, "at": 1.5},
            {"event": "error", "type": "E", "message": "m", "traceback": "t", "missing_file": "", "at": 2},
        )
    )
    return [struct.pack("=Id", 12 + len(body), 1.7e9) + body]


def _read_reports(data: bytes) -> bool:
    reports = Reports()
    memory = reports._memory
    cut = data[: len(memory)]
    memory[: len(cut)] = cut
    found = reports.receive()
    for message in found:
        assert message["event"] in {"started", "error"}, message
        wire.encode_line(message)
    at = reports.terminated_at
    assert at is None or at > 0
    memory.close()
    return bool(found)


# -- logs


def _logs() -> list[bytes]:
    return [b"1700000000.250 o step 3/60\n1700000001.5 e warning\n1700000001.5 O half a\n"]


def _read_log(data: bytes) -> bool:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        path = log_path(Path(place), 1, 0)
        path.parent.mkdir()
        path.write_bytes(data)
        forward = [entry for batch in LogReader(Path(place)).batches() for entry in batch]
        backward = LogReader(Path(place)).last(len(forward) + 10)
    assert [entry for entry in forward if not 0 <= entry.at <= LATEST_TIME] == []
    assert backward == forward, "the end of a log reads otherwise than its beginning"
    return bool(forward)


def _output() -> list[bytes]:
    return [b"step 3/60 loss=0.5\n\nlast", "ä…".encode() + b"\n"]


def _read_output(data: bytes) -> bool:
    """Write the bytes to a log through a pipe in two parts, and read its lines back."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        path = log_path(Path(place), 1, 0)
        path.parent.mkdir()
        log = LogWriter(path)
        log.feed("o", data[: len(data) // 2], 1.7e9)
        log.feed("o", data[len(data) // 2 :], 1.7e9)
        log.close(1.7e9)
        assert os.path.getsize(path) <= len(data) + 40 * (data.count(b"\n") + len(data) // 60_000 + 2)
        entries = [entry for batch in LogReader(Path(place)).batches() for entry in batch]
    assert len(entries) >= data.count(b"\n")
    for text in (*log.tail, *(entry.text for entry in entries)):
        text.encode()
    return bool(entries)


def _mirror_notes() -> list[bytes]:
    return [json.dumps({"inode": 12, "offset": 300, "size": 200}).encode()]


def _read_mirror_note(data: bytes) -> bool:
    """Read the note beside the daemon's copy of a log; a node's part is appended whatever the note contains."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        path = Path(place) / "rank-00000.log"
        path.write_bytes(b"kept\n")
        path.with_suffix(".mirror").write_bytes(data)
        mirror = LogMirror(path, LogLimits())
        accepted = mirror.place.inode > 0
        mirror.take(LogPart(attempt=1, rank=0, place=LogLocation(inode=1, offset=5), data=b"more\n"))
        assert path.read_bytes().endswith(b"more\n")
    return accepted


READERS = (
    Reader("page", _read_page, lambda: [_page()], ("orchestrator.train.script",)),
    Reader("page-report", _read_record(layout.HOT), lambda: _record_of(layout.HOT), ("orchestrator.train.script",)),
    Reader("page-facts", _read_record(layout.FACTS), lambda: _record_of(layout.FACTS), ("orchestrator.train.script",)),
    Reader("exit-record", _read_exit_record, _exit_records, ("orchestrator.runtime.spawn", "orchestrator.core.codec")),
    Reader("wire", _read_messages, _messages, ("orchestrator.runtime.forkserver.wire",)),
    Reader("spawn-request", _read_request, _requests, ("orchestrator.runtime.forkserver.wire",)),
    Reader(
        "lifeline", _read_lifeline, _lifeline, ("orchestrator.runtime.spawn", "orchestrator.runtime.forkserver.wire")
    ),
    Reader("reports", _read_reports, _reports, ("orchestrator.runtime.forkserver.reports",)),
    Reader("log", _read_log, _logs, ("orchestrator.runtime.ranks.logs",)),
    Reader("log-mirror-note", _read_mirror_note, _mirror_notes, ("orchestrator.runtime.gangs.job_files",)),
    Reader("output", _read_output, _output, ("orchestrator.runtime.ranks.logs",)),
)
