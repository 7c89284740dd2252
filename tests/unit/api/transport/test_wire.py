"""The client's HTTP against servers that misbehave: every answer is a result or one clear error, in time."""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.errors import (
    BadRequestError,
    DaemonUnreachableError,
    DeadlineError,
    NoSuchJobError,
    NotPermittedError,
    OrchError,
    ProtocolMismatchError,
)
from orchestrator.api.transport import wire
from orchestrator.api.transport.endpoint import Endpoint
from tests.support.stack import PATIENCE_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HEAD = b"HTTP/1.1 200 OK\r\nX-Orch-Protocol: 1\r\n"


@contextmanager
def server(path: Path, behave: Callable[[socket.socket], None]) -> Iterator[Endpoint]:
    """Accept one connection and read its request; ``behave`` answers."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path / "s"))
    listener.listen(4)
    listener.settimeout(PATIENCE_SECONDS)

    def serve() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            data = b""
            while b"\r\n\r\n" not in data and (part := connection.recv(65536)):
                data += part
            behave(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Endpoint(socket_path=str(path / "s"))
    finally:
        listener.close()
        thread.join(timeout=PATIENCE_SECONDS)
        assert not thread.is_alive()


def unread(connection: socket.socket) -> int:
    """Return the number of bytes that the other end has not read; 0 when it has gone."""
    try:
        return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def says(*parts: bytes) -> Callable[[socket.socket], None]:
    def behave(connection: socket.socket) -> None:
        for part in parts:
            wait_until("what came before is read: parts arrive apart", lambda: unread(connection) == 0)
            connection.sendall(part)

    return behave


def test_a_body_with_a_length(tmp_path: Path) -> None:
    with server(tmp_path, says(HEAD + b"Content-Length: 7\r\n\r\n", b'{"a"', b":1}")) as endpoint:
        assert wire.call(endpoint, "GET", "/", deadline_seconds=300) == {"a": 1}


def test_a_body_in_chunks_with_extensions_and_trailers(tmp_path: Path) -> None:
    parts = (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
        b"3;x=y\r\n[1,\r",
        b"\n2\r\n2]\r\n",
        b"0\r\nTrailer: x\r\n\r\n",
    )
    with server(tmp_path, says(*parts)) as endpoint:
        assert wire.call(endpoint, "GET", "/", deadline_seconds=300) == [1, 2]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        HEAD,
        HEAD + b"Content-Length: 10\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
)
def test_a_cut_answer_is_a_lost_connection(tmp_path: Path, answer: bytes) -> None:
    with server(tmp_path, says(answer)) as endpoint, pytest.raises(wire.ConnectionLostError):
        wire.call(endpoint, "GET", "/", deadline_seconds=300)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nX-Orch-Protocol: 99\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Content-Length: minus\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 99999999999999\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Content-Length: 4\r\n\r\noops",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 101 + b"\r\n",
        b"x" * 70000,
        HEAD + b"".join(b"X-%d: y\r\n" % i for i in range(200)) + b"\r\n",
    ],
    ids=range(12),
)
def test_what_does_not_speak_our_protocol_is_told_so(tmp_path: Path, answer: bytes) -> None:
    with server(tmp_path, says(answer)) as endpoint, pytest.raises(ProtocolMismatchError):
        wire.call(endpoint, "GET", "/", deadline_seconds=300)


def test_a_mismatch_names_both_versions_and_the_way_out(tmp_path: Path) -> None:
    answer = b"HTTP/1.1 200 OK\r\nX-Orch-Protocol: 99\r\nContent-Length: 2\r\n\r\n{}"
    with server(tmp_path, says(answer)) as endpoint, pytest.raises(ProtocolMismatchError, match=r"99.* 1$") as caught:
        wire.call(endpoint, "GET", "/", deadline_seconds=300)
    assert "orch down && orch up" in caught.value.hint


def test_silence_ends_at_the_deadline(tmp_path: Path) -> None:
    done = threading.Event()
    with server(tmp_path, lambda _: done.wait(300) and None) as endpoint:
        with pytest.raises(DeadlineError):
            wire.call(endpoint, "GET", "/", deadline_seconds=0.2)
        done.set()


def test_drops_of_data_do_not_extend_the_deadline(tmp_path: Path) -> None:
    done = threading.Event()

    def drip(connection: socket.socket) -> None:
        while not done.wait(0.02):
            try:
                connection.sendall(b"H")
            except OSError:
                return

    with server(tmp_path, drip) as endpoint:
        with pytest.raises(DeadlineError):
            wire.call(endpoint, "GET", "/", deadline_seconds=0.3)
        done.set()


def test_a_stream_gives_values_as_they_come_and_leaves_out_heartbeats(tmp_path: Path) -> None:
    body = (b'8\r\n{"a":1}\n\r\n', b"1\r\n\n\r\n", b'4\r\n{"b"\r\n', b"4\r\n:2}\n\r\n", b"0\r\n\r\n")
    with server(tmp_path, says(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *body)) as endpoint:
        assert list(wire.json_lines(endpoint, "/")) == [{"a": 1}, {"b": 2}]


def test_a_cut_stream_gives_what_came_and_then_says_so(tmp_path: Path) -> None:
    body = b'8\r\n{"a":1}\n\r\n'
    with server(tmp_path, says(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", body)) as endpoint:
        lines = wire.json_lines(endpoint, "/")
        assert next(lines) == {"a": 1}
        with pytest.raises(wire.ConnectionLostError):
            next(lines)


def test_a_silent_stream_ends_at_its_idle_limit(tmp_path: Path) -> None:
    done = threading.Event()

    def behave(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        done.wait(300)

    with server(tmp_path, behave) as endpoint:
        with pytest.raises(DeadlineError):
            list(wire.json_lines(endpoint, "/", idle_seconds=0.1))
        done.set()


def test_an_error_of_a_stream_is_raised(tmp_path: Path) -> None:
    body = b'{"code": "no_such_job", "message": "no job is called x"}'
    answer = b"HTTP/1.1 404 Not Found\r\nX-Orch-Protocol: 1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with server(tmp_path, says(answer)) as endpoint, pytest.raises(NoSuchJobError, match="called x"):
        list(wire.json_lines(endpoint, "/"))


@pytest.mark.parametrize("body", [b"<html>oops</html>", b"[]"])
def test_an_error_without_a_reason_is_still_an_error(tmp_path: Path, body: bytes) -> None:
    answer = b"HTTP/1.1 502 Bad Gateway\r\nX-Orch-Protocol: 1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with server(tmp_path, says(answer)) as endpoint, pytest.raises(DaemonUnreachableError, match="502"):
        wire.call(endpoint, "GET", "/")


def test_an_early_refusal_is_read_although_the_body_was_not_taken(tmp_path: Path) -> None:
    body = b'{"code": "request_too_large", "message": "too large"}'
    answer = b"HTTP/1.1 413 x\r\nX-Orch-Protocol: 1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with server(tmp_path, says(answer)) as endpoint, pytest.raises(OrchError, match="too large"):
        wire.call(endpoint, "POST", "/", body={"yaml": "x" * 3_000_000}, deadline_seconds=300)


def test_nothing_listens(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachableError, match="No such file") as caught:
        wire.call(Endpoint(socket_path=str(tmp_path / "none")), "GET", "/")
    assert type(caught.value) is DaemonUnreachableError
    assert "orch up" in caught.value.hint


def test_nothing_listens_on_tcp() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        endpoint = Endpoint(host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(DaemonUnreachableError, match="refused"):
            wire.call(endpoint, "GET", "/", deadline_seconds=300)


def test_a_socket_of_someone_else_is_refused_not_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(wire, "_connect_unix", forbidden)  # root, which may run this test, is never refused
    with pytest.raises(NotPermittedError, match="may not be opened"):
        wire.call(Endpoint(socket_path=str(tmp_path / "s")), "GET", "/")


def test_what_is_not_utf8_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="not UTF-8"):
        wire.call(Endpoint(socket_path=str(tmp_path / "s")), "POST", "/", body={"cwd": "/home/\udcff"})
