"""A read-only HTTP server for one prerendered page: a request only copies bytes.

It runs in a thread with its own event loop, speaks HTTP/1.1 with persistent connections, and has two paths: the page
at `/metrics`, and `/healthz`. On an address other than loopback it requires a bearer token or TLS. It limits a client's
cost: the size of a request, its duration, the number of connections.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.exporter.acceptor import Acceptor
from orchestrator.gpu.exporter.exposition import CONTENT_TYPE

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from pathlib import Path

MAX_REQUEST_BYTES: Final = 16 * 1024
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of the server. Port 0 takes a free one; with `last_port`, the first free one from `port` on.

    A connection is dropped after `idle_seconds` without a request: longer than Prometheus' usual minute between two scrapes
    on one kept connection. `head_seconds` bounds a request's head, from its first byte or from the start of the connection.
    Connections beyond `max_connections` wait until there is room. A client that sends requests and reads nothing is dropped
    when `max_unsent_bytes` wait for it.
    """

    host: str = "127.0.0.1"
    port: int = 0
    last_port: int | None = None
    token: str | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    idle_seconds: float = 75.0
    head_seconds: float = 10.0
    max_unsent_bytes: int = 4 * 1024 * 1024
    max_connections: int = 128

    def validate(self) -> None:
        """Raise ValueError for an address that would be open to anyone, and for half of a TLS pair."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS needs both a certificate and its key; only one of them is set.")
        if self.tls_certificate is None and self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"metrics on {self.host} would be readable by everyone who reaches it. Set a token or TLS, or listen on"
                " 127.0.0.1."
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class MetricsServer:
    """Serves the bytes that `body` returns; `body` is called in the server's thread and must be fast."""

    def __init__(self, settings: HttpSettings, body: Callable[[], bytes]) -> None:
        """Prepare the server, which does not listen yet. Raises ValueError for unsafe settings."""
        settings.validate()
        self._settings = settings
        self._body = body
        # Ray sets uvloop's policy in its workers where uvloop is installed; its sockets cannot be served by Acceptor.
        self._loop = asyncio.SelectorEventLoop()
        self._thread: threading.Thread | None = None
        self._server: Acceptor | None = None
        self._connections: set[_Connection] = set()

    @property
    def url(self) -> str:
        """Return the page's address, once started."""
        assert self._server is not None
        host, port = self._server.sock.getsockname()[:2]
        scheme = "https" if self._settings.tls_certificate else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def start(self) -> None:
        """Listen. Raises OSError when no port is free or the certificate is unreadable."""
        try:
            self._server = self._loop.run_until_complete(self._listen(self._tls()))
        except BaseException:
            self._loop.close()
            raise
        self._thread = threading.Thread(target=self._loop.run_forever, name="orch-metrics-http", daemon=True)
        self._thread.start()

    async def _listen(self, tls: ssl.SSLContext | None) -> Acceptor:
        settings = self._settings
        for port in (settings.port, *range(settings.port + 1, (settings.last_port or 0) + 1)):
            try:
                return Acceptor(await self._bound(port), self._connection, cap=settings.max_connections, tls=tls)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or settings.last_port is None:
                    raise
        raise OSError(
            errno.EADDRINUSE,
            f"every port from {settings.port} to {settings.last_port} of {settings.host} is taken; widen the range"
            " (ORCH_EXPORTER_PORTS)",
        )

    async def _bound(self, port: int) -> socket.socket:
        host = self._settings.host
        family, kind, proto, _, address = (
            await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        )[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(self._settings.max_connections)
        except BaseException:
            sock.close()
            raise
        return sock

    def _connection(self, release: Callable[[], None]) -> _Connection:
        return _Connection(self._connections, self._body, self._settings, release)

    def _tls(self) -> ssl.SSLContext | None:
        if self._settings.tls_certificate is None:
            return None
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._settings.tls_certificate, self._settings.tls_key)
        return context

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run a fast function in the server's thread; after `stop` do nothing."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return  # the loop is closed: no client is left

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Run a fast function in `delay` seconds; call in the server's thread."""
        self._loop.call_later(delay, callback)

    def stop(self) -> None:
        """Stop listening and drop every connection."""
        if self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._shut)
        self._thread.join()
        self._thread = None
        self._loop.close()

    def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.drop()
        # One more turn of the loop, so that the transports close their sockets.
        self._loop.call_later(0, self._loop.stop)


class _Connection(asyncio.Protocol):
    """One client."""

    def __init__(
        self,
        connections: set[_Connection],
        body: Callable[[], bytes],
        settings: HttpSettings,
        release: Callable[[], None],
    ) -> None:
        self._release = release
        self._connections = connections
        self._body = body
        self._settings = settings
        self._expected = f"Bearer {settings.token}".encode() if settings.token is not None else None
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        self._rearm(self._settings.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._release()

    def drop(self) -> None:
        """Close without waiting for the client."""
        if self._transport is not None:
            self._transport.abort()

    def _rearm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.drop)

    def data_received(self, data: bytes) -> None:
        begins = not self._buffer
        self._buffer += data
        while True:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                if len(self._buffer) > MAX_REQUEST_BYTES:
                    self._answer(431, b"request too large\n", close=True)
                elif begins and self._buffer:
                    self._rearm(self._settings.head_seconds)
                return
            self._buffer, begins = rest, True
            self._rearm(self._settings.idle_seconds)
            if not self._handle(head):
                return
            if (
                self._transport is not None
                and self._transport.get_write_buffer_size() > self._settings.max_unsent_bytes
            ):
                self.drop()
                return

    def _handle(self, head: bytes) -> bool:
        """Answer one request; return whether the connection stays."""
        request, _, block = head.partition(b"\r\n")
        words = request.split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            self._answer(400, b"not HTTP/1.x\n", close=True)
            return False
        headers: dict[bytes, bytes] = {}
        for line in block.split(b"\r\n"):
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        method, path = words[0], words[1].partition(b"?")[0]
        keep = headers.get(b"connection", b"").lower() != b"close" and words[2] == b"HTTP/1.1"
        if headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers:
            keep = False  # no request here has a body: what follows is not interpreted
        code, body = self._respond(method, path, headers.get(b"authorization", b""))
        self._answer(code, body, close=not keep, head_only=method == b"HEAD", plain=path != b"/metrics" or code != 200)
        return keep

    def _respond(self, method: bytes, path: bytes, authorization: bytes) -> tuple[int, bytes]:
        if path == b"/healthz":
            return 200, b"ok\n"
        if self._expected is not None and not hmac.compare_digest(authorization, self._expected):
            return 401, b"send the exporter's token: Authorization: Bearer TOKEN\n"
        if path != b"/metrics":
            return 404, b"the metrics are at /metrics\n"
        if method not in {b"GET", b"HEAD"}:
            return 405, b"metrics can only be read\n"
        return 200, self._body()

    def _answer(self, code: int, body: bytes, *, close: bool, head_only: bool = False, plain: bool = True) -> None:
        assert self._transport is not None
        kind = "text/plain; charset=utf-8" if plain else CONTENT_TYPE
        extra = "WWW-Authenticate: Bearer\r\n" if code == 401 else ""
        extra += "Allow: GET, HEAD\r\n" if code == 405 else ""
        head = (
            f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            f"{extra}Connection: {'close' if close else 'keep-alive'}\r\n\r\n"
        )
        self._transport.write(head.encode() + (b"" if head_only else body))
        if close:
            self._transport.close()
