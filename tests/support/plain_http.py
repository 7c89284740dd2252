"""An independent HTTP client from the standard library, which plays curl, browsers and attackers."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.api.transport.endpoint import Endpoint


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=300)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_SECONDS)
        self.sock.connect(self._path)


def ask(
    endpoint: Endpoint,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | Iterable[bytes] | None = None,
) -> Answer:
    """Send one request exactly as given; an iterable body is sent in chunks."""
    connection = (
        UnixConnection(endpoint.socket_path)
        if endpoint.socket_path
        else http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=300)
    )
    try:
        chunked = body is not None and not isinstance(body, bytes)
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # refused before all was sent; the answer has arrived
            connection.request(method, path, body=body, headers=dict(headers or {}), encode_chunked=chunked)
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


JSON = {"Content-Type": "application/json"}
