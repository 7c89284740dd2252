"""The client's half of HTTP/1.1, over a Unix socket or TCP, with a deadline on every call.

Why not http.client: importing it takes 25 ms (it loads ssl and the e-mail parser), a tenth of the time budget of ``orch
submit``. This code talks to the daemon only: one request on one connection, bodies with a length or in chunks. It
must not grow redirects, proxies or TLS; a program that needs those has httpx.
"""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.api.errors import (
    BadRequestError,
    DaemonFrozenError,
    DaemonUnreachableError,
    DeadlineError,
    NotPermittedError,
    OrchError,
    ProtocolMismatchError,
    error_from_json,
)
from orchestrator.api.protocol import PROTOCOL_HEADER, PROTOCOL_VERSION
from orchestrator.api.transport.endpoint import may_serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.api.transport.endpoint import Endpoint

JSON, BYTES = "application/json", "application/octet-stream"
MAX_HEAD_BYTES = 64 * 1024
MAX_REPLY_BYTES = 256 * 1024 * 1024
RECEIVE_BYTES = 64 * 1024
BUSY_RETRY_SECONDS = 0.02


class ConnectionLostError(DaemonUnreachableError):
    """The daemon disconnected after the request was sent; it may or may not have acted on it. Repeat with the same key."""

    code = "connection_lost"


class Reply(NamedTuple):
    """A complete answer."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Stream:
    """The receiving half of a connection: a buffer, and a deadline for the next read."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint) -> None:
        self._socket = sock
        self._label = endpoint.label
        self._silence_seconds = endpoint.silence_seconds
        self._buffer = bytearray()
        self.deadline = 0.0

    def _receive(self) -> bool:
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"the daemon at {self._label} did not answer in time")
            self._socket.settimeout(min(left, self._silence_seconds))
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except TimeoutError:
                check_running(self._socket, self._label)
                continue
            except OSError as error:
                raise ConnectionLostError(f"the daemon at {self._label} broke the connection: {error}") from error
            self._buffer += data
            return bool(data)

    def line(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ProtocolMismatchError(f"the process that listens at {self._label} does not use orch's protocol")
            if not self._receive():
                raise ConnectionLostError(f"the daemon at {self._label} went away before it answered")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line.rstrip(b"\r")

    def exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not self._receive():
                raise ConnectionLostError(f"the daemon at {self._label} went away in the middle of its answer")
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def head(self) -> tuple[int, dict[str, str]]:
        version, _, rest = self.line().partition(b" ")
        code = rest[:3]
        if not version.startswith(b"HTTP/1.") or not code.isdigit():
            raise ProtocolMismatchError(f"the process that listens at {self._label} does not use orch's protocol")
        headers: dict[str, str] = {}
        while line := self.line():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
            if len(headers) > 100:
                raise ProtocolMismatchError(f"the process that listens at {self._label} does not use orch's protocol")
        return int(code), headers

    def chunks(self, headers: dict[str, str]) -> Iterator[bytes]:
        """Yield the body as it arrives. Ends only at the body's proper end; a lost connection raises."""
        if headers.get("transfer-encoding", "").lower() != "chunked":
            yield self.exactly(_length(headers.get("content-length", "0"), 10, self._label))
            return
        while size := _length(self.line().partition(b";")[0].decode("latin-1"), 16, self._label):
            yield self.exactly(size)
            self.line()
        while self.line():
            pass


def check_running(sock: socket.socket, label: str) -> None:
    """Raise DaemonFrozenError when the process at the other end of a Unix socket is stopped."""
    from orchestrator.api.transport.peer import credentials, is_stopped

    peer = credentials(sock)
    if peer is not None and is_stopped(peer[0]):
        raise DaemonFrozenError.of(label, peer[0])


def _length(text: str, base: int, label: str) -> int:
    try:
        size = int(text, base)
    except ValueError:
        size = -1
    if not 0 <= size <= MAX_REPLY_BYTES:
        raise ProtocolMismatchError(f"the process that listens at {label} does not use orch's protocol")
    return size


def connect(endpoint: Endpoint, deadline: float) -> socket.socket:
    """Return a connected socket; ``deadline`` is monotonic time. Raises DaemonUnreachableError, NotPermittedError."""
    deadline = min(deadline, time.monotonic() + endpoint.connect_seconds)
    left = max(0.001, deadline - time.monotonic())
    try:
        if not endpoint.socket_path:
            return socket.create_connection((endpoint.host, endpoint.port), timeout=left)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect_unix(sock, endpoint.socket_path, deadline)
            _refuse_a_false_daemon(sock, endpoint.socket_path)
        except BaseException:
            sock.close()
            raise
    except PermissionError as error:
        raise NotPermittedError(
            f"{endpoint.label} may not be opened by this user",
            hint="the daemon belongs to another user: ask its owner for a group socket, or use a daemon of your own with ORCH_HOME=DIRECTORY",
        ) from error
    except OSError as error:
        elsewhere = (
            "check that it runs there and that a tunnel to it is open; `orch login` shows and changes the address"
        )
        raise DaemonUnreachableError(
            f"no daemon answers at {endpoint.label} ({error.strerror or error})",
            hint="" if endpoint.socket_path else elsewhere,
        ) from error
    return sock


def _refuse_a_false_daemon(sock: socket.socket, path: str) -> None:
    from orchestrator.api.transport.peer import credentials

    peer = credentials(sock)
    uid = -1 if peer is None else peer[1]
    if not may_serve(path, uid):
        raise NotPermittedError(
            f"the process that listens at {path} belongs to user {uid}",
            hint="set ORCH_HOME to a directory of your own, or of a daemon's user; nothing was sent",
        )


def _connect_unix(sock: socket.socket, path: str, deadline: float) -> None:
    while True:
        left = deadline - time.monotonic()
        sock.settimeout(max(0.001, left))
        try:
            return sock.connect(path)
        except BlockingIOError:  # the listener's queue is full: Linux reports that at once instead of waiting
            if left <= BUSY_RETRY_SECONDS:
                raise
            time.sleep(BUSY_RETRY_SECONDS)


def _request(endpoint: Endpoint, method: str, path: str, body: bytes | None, media_type: str = JSON) -> bytes:
    host = "localhost" if endpoint.socket_path else host_header(endpoint)
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        f"{PROTOCOL_HEADER}: {PROTOCOL_VERSION}",
        "Connection: close",
    ]
    if endpoint.token:
        lines.append(f"Authorization: Bearer {endpoint.token}")
    if body is not None:
        lines += [f"Content-Type: {media_type}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def host_header(endpoint: Endpoint) -> str:
    """Return the Host header of an address over TCP."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{host}:{endpoint.port}"


def _open(
    endpoint: Endpoint, method: str, path: str, body: bytes | None, deadline: float, media_type: str = JSON
) -> tuple[socket.socket, _Stream, int, dict[str, str]]:
    sock = connect(endpoint, deadline)
    try:
        try:
            sock.settimeout(max(0.001, min(deadline - time.monotonic(), endpoint.connect_seconds)))
            sock.sendall(_request(endpoint, method, path, body, media_type))
        except TimeoutError as error:
            check_running(sock, endpoint.label)
            raise DeadlineError(f"the daemon at {endpoint.label} did not take the request in time") from error
        except (BrokenPipeError, ConnectionResetError):
            pass  # a server that refuses an oversized body answers and closes; its answer may still be read
        stream = _Stream(sock, endpoint)
        stream.deadline = deadline
        status, headers = stream.head()
        check_protocol(headers, endpoint)
    except BaseException:
        sock.close()
        raise
    return sock, stream, status, headers


def check_protocol(headers: dict[str, str], endpoint: Endpoint) -> None:
    """Raise ProtocolMismatchError unless the answer is of a daemon of this protocol."""
    spoken = headers.get(PROTOCOL_HEADER.lower(), "")
    if spoken != str(PROTOCOL_VERSION):
        raise ProtocolMismatchError(
            f"the daemon at {endpoint.label} speaks protocol {spoken or 'unknown'}, this command {PROTOCOL_VERSION}"
        )


def exchange(
    endpoint: Endpoint,
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    deadline_seconds: float = 10.0,
    media_type: str = JSON,
) -> Reply:
    """Send one request and return its whole answer within ``deadline_seconds``.

    Raises DaemonUnreachableError if nothing was sent, ConnectionLostError if the answer was lost, DeadlineError,
    ProtocolMismatchError. The status is not checked here.
    """
    sock, stream, status, headers = _open(endpoint, method, path, body, time.monotonic() + deadline_seconds, media_type)
    with sock:
        return Reply(status, headers, b"".join(stream.chunks(headers)))


def call(endpoint: Endpoint, method: str, path: str, *, body: object = None, deadline_seconds: float = 10.0) -> Any:
    """Call ``exchange`` with JSON both ways; an answer of 400 and up is raised as the error that it describes."""
    data = None if body is None else _encoded(body)
    reply = exchange(endpoint, method, path, body=data, deadline_seconds=deadline_seconds)
    if reply.status >= 400:
        raise _error_of(reply, endpoint)
    return _decoded(reply.body, endpoint)


def fetch(endpoint: Endpoint, method: str, path: str, *, body: object = None, deadline_seconds: float = 10.0) -> bytes:
    """Do as ``call`` does, for an answer that is not JSON."""
    data = None if body is None else _encoded(body)
    reply = exchange(endpoint, method, path, body=data, deadline_seconds=deadline_seconds)
    if reply.status >= 400:
        raise _error_of(reply, endpoint)
    return reply.body


def send(endpoint: Endpoint, path: str, data: bytes, *, deadline_seconds: float) -> None:
    """Post bytes that are not JSON. An answer of 400 and up is raised as the error that it describes."""
    reply = exchange(endpoint, "POST", path, body=data, deadline_seconds=deadline_seconds, media_type=BYTES)
    if reply.status >= 400:
        raise _error_of(reply, endpoint)


def _encoded(body: object) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        broken = error.object[max(0, error.start - 20) : error.end + 20]
        raise BadRequestError(
            f"{broken!r} holds bytes that are not UTF-8", hint="rename the file, directory or variable that holds them"
        ) from error


def _decoded(body: bytes, endpoint: Endpoint) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolMismatchError(
            f"the process that listens at {endpoint.label} does not use orch's protocol"
        ) from error


def _error_of(reply: Reply, endpoint: Endpoint) -> OrchError:
    try:
        body = json.loads(reply.body)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return DaemonUnreachableError(f"the daemon at {endpoint.label} answered {reply.status} without a reason")
    return error_from_json(body)


def pieces(endpoint: Endpoint, path: str, *, silence_seconds: float = 60.0) -> Iterator[bytes]:
    """Yield the bytes of a streamed answer; ``silence_seconds`` bounds each wait. A lost connection raises."""
    sock, stream, status, headers = _open(endpoint, "GET", path, None, time.monotonic() + silence_seconds)
    with sock:
        if status >= 400:
            raise _error_of(Reply(status, headers, b"".join(stream.chunks(headers))), endpoint)
        for piece in stream.chunks(headers):
            stream.deadline = time.monotonic() + silence_seconds
            yield piece


def json_lines(
    endpoint: Endpoint, path: str, *, deadline_seconds: float = 10.0, idle_seconds: float = 30.0
) -> Iterator[Any]:
    """Yield JSON values, one from each line of a streamed answer; empty lines are heartbeats and are left out.

    ``deadline_seconds`` bounds the beginning, ``idle_seconds`` each silence after it. Ends at the stream's proper end;
    raises ConnectionLostError if it ends early, DeadlineError after a silence.
    """
    sock, stream, status, headers = _open(endpoint, "GET", path, None, time.monotonic() + deadline_seconds)
    with sock:
        if status >= 400:
            raise _error_of(Reply(status, headers, b"".join(stream.chunks(headers))), endpoint)
        pending = bytearray()
        stream.deadline = time.monotonic() + idle_seconds
        for chunk in stream.chunks(headers):
            pending += chunk
            *lines, rest = pending.split(b"\n")
            pending = bytearray(rest)
            for line in lines:
                if line.strip():
                    yield _decoded(bytes(line), endpoint)
            stream.deadline = time.monotonic() + idle_seconds
