"""The client's half of HTTP, over a Unix socket or TCP: one request on one connection, with a deadline on every call.

``http.client`` reads the answers. Why not httpx: its import takes 0.1 s of processor time, a third of what `orch submit`
may take until the first training step, and its timeouts end a request, whereas a silent daemon is first checked for
being stopped. Proxies, redirects and TLS have no part in this.
"""

from __future__ import annotations

import io
import json
import os
import socket
import time
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any

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
from orchestrator.api.transport.endpoint import group_socket, may_serve

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from email.message import Message

    from orchestrator.api.transport.endpoint import Endpoint

JSON, BYTES = "application/json", "application/octet-stream"
MAX_REPLY_BYTES = 256 * 1024 * 1024
RECEIVE_BYTES = 64 * 1024
BUSY_RETRY_SECONDS = 0.02


class ConnectionLostError(DaemonUnreachableError):
    """The daemon disconnected after the request was sent; it may or may not have acted on it. Repeat with the same key."""

    code = "connection_lost"


class _Incoming(io.RawIOBase):
    """The receiving half of a connection as a file; ``deadline`` bounds each read."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint, deadline: float) -> None:
        self._socket, self._label, self._silence_seconds = sock, endpoint.label, endpoint.silence_seconds
        self.deadline = deadline
        self.ended = False

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return the file that ``HTTPResponse`` reads."""
        return io.BufferedReader(self, RECEIVE_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"the daemon at {self._label} did not answer in time")
            self._socket.settimeout(min(left, self._silence_seconds))
            try:
                size = self._socket.recv_into(buffer)
            except TimeoutError:
                check_running(self._socket, self._label)
                continue
            except OSError as error:
                raise ConnectionLostError(f"the daemon at {self._label} broke the connection: {error}") from error
            self.ended = self.ended or not size
            return size

    def close(self) -> None:
        self._socket.close()
        super().close()


def check_running(sock: socket.socket, label: str) -> None:
    """Raise DaemonFrozenError when the process at the other end of a Unix socket is stopped."""
    from orchestrator.api.transport.peer import credentials, is_stopped

    peer = credentials(sock)
    if peer is not None and is_stopped(peer[0]):
        raise DaemonFrozenError.of(label, peer[0])


def connect(endpoint: Endpoint, deadline: float) -> socket.socket:
    """Return a connected socket; ``deadline`` is monotonic time. Raises DaemonUnreachableError, NotPermittedError."""
    deadline = min(deadline, time.monotonic() + endpoint.connect_seconds)
    left = max(0.001, deadline - time.monotonic())
    try:
        if not endpoint.socket_path:
            return socket.create_connection((endpoint.host, endpoint.port), timeout=left)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            try:
                _connect_unix(sock, endpoint.socket_path, deadline)
            except PermissionError:
                if not os.path.exists(group_socket(endpoint.socket_path)):
                    raise
                _connect_unix(sock, group_socket(endpoint.socket_path), deadline)
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


@contextmanager
def _open(
    endpoint: Endpoint, method: str, path: str, body: bytes | None, deadline: float, media_type: str = JSON
) -> Iterator[tuple[HTTPResponse, _Incoming]]:
    """Send a request and give its answer, up to the body. An answer of 400 and up is raised as the error that it describes."""
    with connect(endpoint, deadline) as sock:
        try:
            sock.settimeout(max(0.001, min(deadline - time.monotonic(), endpoint.connect_seconds)))
            sock.sendall(_request(endpoint, method, path, body, media_type))
        except TimeoutError as error:
            check_running(sock, endpoint.label)
            raise DeadlineError(f"the daemon at {endpoint.label} did not take the request in time") from error
        except (BrokenPipeError, ConnectionResetError):
            pass  # a server that refuses an oversized body answers and closes; its answer may still be read
        incoming = _Incoming(sock, endpoint, deadline)
        response = HTTPResponse(incoming, method=method)  # type: ignore[arg-type]  # only makefile is called
        try:
            response.begin()
            check_protocol(response.headers, endpoint)
            _check_length(response)
            if response.status >= 400:
                raise _error_of(response.status, response.read(), endpoint)
            yield response, incoming
        except (HTTPException, ValueError) as error:
            if incoming.ended:
                raise ConnectionLostError(
                    f"the daemon at {endpoint.label} went away before its answer ended"
                ) from error
            raise _mismatch(endpoint.label) from error


def _check_length(response: HTTPResponse) -> None:
    size = response.length
    if not response.chunked and (size is None or size > MAX_REPLY_BYTES):
        raise HTTPException("the end of the body cannot be recognized")


def _mismatch(label: str) -> ProtocolMismatchError:
    return ProtocolMismatchError(f"the process that listens at {label} does not use orch's protocol")


def check_protocol(headers: Mapping[str, str] | Message, endpoint: Endpoint) -> None:
    """Raise ProtocolMismatchError unless the answer is of a daemon of this protocol."""
    spoken = headers.get(PROTOCOL_HEADER.lower(), "")
    if spoken != str(PROTOCOL_VERSION):
        raise ProtocolMismatchError(
            f"the daemon at {endpoint.label} speaks protocol {spoken or 'unknown'}, this command {PROTOCOL_VERSION}"
        )


def call(endpoint: Endpoint, method: str, path: str, *, body: object = None, deadline_seconds: float = 10.0) -> Any:
    """Call ``fetch`` and decode its JSON."""
    return _decoded(fetch(endpoint, method, path, body=body, deadline_seconds=deadline_seconds), endpoint)


def fetch(endpoint: Endpoint, method: str, path: str, *, body: object = None, deadline_seconds: float = 10.0) -> bytes:
    """Send one request, with ``body`` as JSON, and return its whole answer within ``deadline_seconds``.

    Raises the daemon's error, DaemonUnreachableError if nothing was sent, ConnectionLostError if the answer was lost,
    DeadlineError, ProtocolMismatchError.
    """
    data = None if body is None else _encoded(body)
    with _open(endpoint, method, path, data, time.monotonic() + deadline_seconds) as (response, _):
        return response.read()


def send(endpoint: Endpoint, path: str, data: bytes, *, deadline_seconds: float) -> None:
    """Post bytes that are not JSON. Raises as ``fetch`` does."""
    with _open(endpoint, "POST", path, data, time.monotonic() + deadline_seconds, BYTES) as (response, _):
        response.read()


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
        raise _mismatch(endpoint.label) from error


def _error_of(status: int, body: bytes, endpoint: Endpoint) -> OrchError:
    try:
        problem = json.loads(body)
    except (ValueError, RecursionError):
        problem = None
    if not isinstance(problem, dict):
        return DaemonUnreachableError(f"the daemon at {endpoint.label} answered {status} without a reason")
    return error_from_json(problem)


def pieces(
    endpoint: Endpoint, path: str, *, silence_seconds: float = 60.0, deadline_seconds: float | None = None
) -> Iterator[bytes]:
    """Yield the bytes of a streamed answer as they arrive. Ends only at their proper end; a lost connection raises.

    ``deadline_seconds`` (default: as the other) bounds the beginning, ``silence_seconds`` each wait after it.
    """
    deadline = time.monotonic() + (silence_seconds if deadline_seconds is None else deadline_seconds)
    with _open(endpoint, "GET", path, None, deadline) as (response, incoming):
        while True:
            incoming.deadline = time.monotonic() + silence_seconds
            piece = response.read1(RECEIVE_BYTES)
            if not piece:
                if response.length:
                    raise HTTPException("the connection was closed within the body")
                return
            yield piece


def json_lines(
    endpoint: Endpoint, path: str, *, deadline_seconds: float = 10.0, idle_seconds: float = 30.0
) -> Iterator[Any]:
    """Yield JSON values, one from each line of a streamed answer; empty lines are heartbeats and are left out.

    ``deadline_seconds`` bounds the beginning, ``idle_seconds`` each silence after it. Ends at the stream's proper end;
    raises ConnectionLostError if it ends early, DeadlineError after a silence.
    """
    pending = b""
    for chunk in pieces(endpoint, path, silence_seconds=idle_seconds, deadline_seconds=deadline_seconds):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield _decoded(line, endpoint)
