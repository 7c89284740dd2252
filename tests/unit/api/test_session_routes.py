"""Sessions beside a rank over the API: data in both directions, ends from either side, and refused requests."""

from __future__ import annotations

import os
import select
import signal
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.client import Client
from orchestrator.api.errors import (
    BadRequestError,
    DaemonStoppingError,
    NoSuchJobError,
    NotPermittedError,
    OrchError,
    RefusedError,
    RequestTooLargeError,
    UnauthenticatedError,
)
from orchestrator.api.server.testing import serve_fake
from orchestrator.api.transport.session_stream import STDERR, STDOUT, End, Output, SessionStream
from orchestrator.api.transport.wire import ConnectionLostError
from orchestrator.runtime.ranks.session_messages import AttachRequest, CommandRequest, PortRequest, Terminal
from tests.support.stack import PATIENCE_SECONDS, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.api.server.testing import ServedFake
    from orchestrator.api.views import JobView


@pytest.fixture
def job(served: ServedFake) -> JobView:
    found: JobView = served.do(lambda service: service.add("digits", state="RUNNING", uid=os.getuid()))
    return found


def what_comes(stream: SessionStream) -> list[Output | End]:
    """Wait for messages of the session, and return them."""
    while not (found := stream.receive()):
        ready, _, _ = select.select([stream], [stream] if stream.waiting else [], [], PATIENCE_SECONDS)
        assert ready or stream.waiting
        stream.flush()
    return found


def requests_of(served: ServedFake) -> Any:
    return served.do(lambda service: [call[1] for call in service.calls if call[0] == "session"])


def test_input_becomes_output_until_its_end(served: ServedFake, client: Client, job: JobView) -> None:
    stream = client.session(job.id, rank=1, argv=["cat", "-n"])
    assert stream.opened == {"job_id": job.id, "rank": 1}
    stream.write(b"hello\xff\0")
    assert what_comes(stream) == [Output(STDOUT, b"hello\xff\0")]
    stream.end_input()
    assert what_comes(stream) == [End("exited", 0, None)]
    stream.close()
    (rank, request, _user) = requests_of(served)[0]
    assert (rank, request) == (1, CommandRequest(argv=("cat", "-n"), terminal=None, secrets=True))


def test_a_terminal_its_size_and_signals(served: ServedFake, client: Client, job: JobView) -> None:
    stream = client.session(job.id, terminal={"rows": 24, "columns": 80, "kind": "xterm-256color"})
    stream.resize(50, 200)
    assert what_comes(stream) == [Output(STDERR, b"50x200\n")]
    stream.signal(signal.SIGTERM)
    assert what_comes(stream) == [End("exited", None, signal.SIGTERM)]
    stream.close()
    assert requests_of(served)[0][1].terminal == Terminal(rows=24, columns=80, kind="xterm-256color")


def test_a_port(served: ServedFake, client: Client, job: JobView) -> None:
    client.session(job.id, port=6006).close()
    assert requests_of(served)[0][1] == PortRequest(port=6006)


def test_a_rank_s_own_terminal(served: ServedFake, client: Client, job: JobView) -> None:
    size = {"rows": 24, "columns": 80, "kind": "xterm"}
    client.session(job.id, rank=1, attach=True, terminal=size).close()
    client.session(job.id, attach=True).close()
    terminals = [call[1].terminal for call in requests_of(served) if isinstance(call[1], AttachRequest)]
    assert terminals == [Terminal(rows=24, columns=80, kind="xterm"), None]


def test_much_input_is_held_back_and_nothing_is_lost(client: Client, job: JobView) -> None:
    stream = client.session(job.id)
    sent, received = bytes(range(256)) * 8192, bytearray()
    for start in range(0, len(sent), 32768):
        stream.write(sent[start : start + 32768])
    while len(received) < len(sent):
        received += b"".join(found.data for found in what_comes(stream) if isinstance(found, Output))
    assert bytes(received) == sent
    stream.close()


def test_the_session_ends_when_the_client_goes(
    served: ServedFake, client: Client, job: JobView, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.api.server.testing import FakeSession

    closed: list[FakeSession] = []

    async def close(self: FakeSession) -> None:
        closed.append(self)

    monkeypatch.setattr(FakeSession, "close", close)
    client.session(job.id).close()
    wait_until("the session is closed", lambda: closed)


def test_a_daemon_that_stops_says_so(served: ServedFake, client: Client, job: JobView) -> None:
    stream = client.session(job.id)
    served.stop()

    def read_on() -> None:
        while True:
            what_comes(stream)

    with pytest.raises((DaemonStoppingError, ConnectionLostError)):
        read_on()
    stream.close()
    served.start()


@pytest.mark.parametrize(
    ("opening", "error"),
    [
        ({"rank": -1, "command": {}}, BadRequestError),
        ({"rank": "0", "command": {}}, BadRequestError),
        ({"rank": 0}, BadRequestError),
        ({"rank": 0, "command": {}, "port": 80}, BadRequestError),
        ({"rank": 0, "command": {}, "attach": {}}, BadRequestError),
        ({"rank": 0, "attach": {"argv": ["sh"]}}, BadRequestError),
        ({"rank": 0, "port": 0}, BadRequestError),
        ({"rank": 0, "port": 65536}, BadRequestError),
        ({"rank": 0, "command": {"argv": ["a\0b"]}}, BadRequestError),
        ({"rank": 0, "command": {"argv": ["x"] * 5000}}, BadRequestError),
        ({"rank": 0, "command": {"argv": ["x" * 70_000]}}, BadRequestError),
        ({"rank": 0, "command": {"terminal": {"rows": 99_999, "columns": 80, "kind": "xterm"}}}, BadRequestError),
        ({"rank": 0, "command": {"terminal": {"rows": 9, "columns": 80, "kind": "a b\n"}}}, BadRequestError),
        ({"rank": 0, "command": {}, "user": "root"}, BadRequestError),
        ({"rank": 0, "command": {"argv": ["x" * 60_000] * 9}}, RequestTooLargeError),
    ],
)
def test_what_makes_no_sense_is_refused(
    served: ServedFake, job: JobView, opening: dict[str, Any], error: type[OrchError]
) -> None:
    with pytest.raises(error):
        SessionStream(served.endpoint, f"/jobs/{job.id}/session", opening)
    assert requests_of(served) == []


def test_control_messages_are_checked(client: Client, job: JobView) -> None:
    for number in (0, 19, 64, 10**9):  # SIGSTOP is among them: nothing could continue a stopped command
        stream = client.session(job.id)
        stream.signal(number)
        with pytest.raises(BadRequestError, match="cannot be sent"):
            what_comes(stream)
        stream.close()
    stream = client.session(job.id)
    stream.resize(-1, 10)
    with pytest.raises(BadRequestError):
        what_comes(stream)
    stream.close()


def test_jobs_that_cannot_be_entered(served: ServedFake, client: Client) -> None:
    waiting = served.do(lambda service: service.add("later"))
    with pytest.raises(RefusedError, match="does not run"):
        client.session(waiting.id)
    with pytest.raises(NoSuchJobError):
        client.session("nothing")
    with pytest.raises(BadRequestError):
        SessionStream(served.endpoint, "/jobs/.hidden/session", {"rank": 0, "command": {}})


def test_another_users_job_is_closed(tmp_path: Path) -> None:
    with serve_fake(tmp_path, owner_uid=os.getuid() + 1) as served:  # the caller is not the daemon's owner
        theirs = served.do(lambda service: service.add("theirs", state="RUNNING", uid=os.getuid() + 2, user="bea"))
        mine = served.do(lambda service: service.add("mine", state="RUNNING", uid=os.getuid()))
        client = Client(served.endpoint, environ={})
        for wanted in ({}, {"port": 8888}):
            with pytest.raises(NotPermittedError, match="belongs to bea"):
                client.session(theirs.id, **wanted)
        assert requests_of(served) == []
        client.session(mine.id).close()
        assert requests_of(served)[0][1].secrets


def test_the_daemons_owner_gets_no_secrets_of_others(served: ServedFake, client: Client) -> None:
    theirs = served.do(lambda service: service.add("theirs", state="RUNNING", uid=os.getuid() + 2))
    client.session(theirs.id).close()
    assert not requests_of(served)[0][1].secrets


def test_over_tcp_the_token_is_wanted(served: ServedFake, job: JobView) -> None:
    stream = Client(served.tcp_endpoint, environ={}).session(job.id)
    stream.write(b"hello")
    assert what_comes(stream) == [Output(STDOUT, b"hello")]
    stream.close()
    for token in ("", "wrong"):
        with pytest.raises(UnauthenticatedError):
            Client(replace_token(served, token), environ={}).session(job.id)


def replace_token(served: ServedFake, token: str) -> Any:
    return served.tcp_endpoint._replace(token=token)


def test_the_reading_port_opens_no_sessions(served: ServedFake, job: JobView) -> None:
    host, _, port = served.read_address.rpartition(":")
    endpoint = served.tcp_endpoint._replace(host=host, port=int(port))
    with pytest.raises(OrchError):
        Client(endpoint, environ={}).session(job.id)


def test_pages_of_other_sites_open_no_sessions(served: ServedFake, job: JobView) -> None:
    import socket

    head = (
        f"GET /api/v1/jobs/{job.id}/session HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_SECONDS)
        sock.connect(served.endpoint.socket_path)
        sock.sendall(head.encode())
        assert b" 403 " in sock.recv(65536)


def test_connections_are_given_back(tmp_path: Path) -> None:
    with serve_fake(tmp_path, owner_uid=os.getuid()) as served:
        job = served.do(lambda service: service.add("digits", state="RUNNING", uid=os.getuid()))
        client = Client(served.endpoint, environ={})
        for _ in range(40):
            client.session(job.id).close()
        assert client.health()


def test_an_output_and_an_error_that_come_together_are_told_one_after_the_other(client: Client, job: JobView) -> None:
    stream = client.session(job.id)
    stream.write(b"last words")
    stream.signal(10**6)
    told: list[Output | End] = []

    def read_on() -> None:
        while True:
            told.extend(what_comes(stream))

    with pytest.raises(BadRequestError):
        read_on()
    assert told in ([Output(STDOUT, b"last words")], [])
    stream.close()
