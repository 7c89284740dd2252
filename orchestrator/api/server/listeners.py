"""Listeners: TCP sockets, and the uvicorn servers behind them and behind the control socket (`control_socket.py`).

The daemon owns signals and decides when to stop; the servers here install no handlers and wake up only for requests.

An ``Acceptor`` accepts connections for one listener: up to a limit, and none while the process has no free descriptors. Connections
over the limit wait in the kernel's queue. asyncio's own server has no limit and, without descriptors, retries for each entry of
that queue, with a traceback for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import resource
import socket
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.api.errors import BadRequestError, RefusedError
from orchestrator.api.protocol import BODY_SECONDS
from orchestrator.api.server.gate import LOOPBACK_NAMES, Peer, framed
from orchestrator.api.server.session_routes import MAX_MESSAGE_BYTES, WebSocketSession
from orchestrator.api.transport.peer import credentials

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Sequence

    from starlette.types import ASGIApp

RETRY_SECONDS: Final = 1.0
BATCH: Final = 64
HANDSHAKE_SECONDS: Final = 10.0
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def _unreported(_error: OSError | None) -> None:
    """No-op default."""


def _admitted(_connection: socket.socket) -> bool:
    """Admit every connection."""
    return True


class Acceptor:
    """Serves ``sock``, which already listens, until ``close``. Created and used in the event loop's thread.

    A connection that ``admit`` does not admit is closed at once, at the cost of a system call. ``make`` returns the protocol of a new connection; its argument is a function that the protocol must call once, in
    its ``connection_lost``. ``on_pause`` is called at each pause: with the error, or None for the limit. Without
    descriptors, it accepts again after ``retry_seconds``.
    """

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[Callable[[], None]], asyncio.Protocol],
        *,
        cap: int,
        tls: ssl.SSLContext | None = None,
        admit: Callable[[socket.socket], bool] = _admitted,
        on_pause: Callable[[OSError | None], None] = _unreported,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.sock = sock
        self._make = make
        self._cap = cap
        self._tls = tls
        self._admit = admit
        self._on_pause = on_pause
        self._retry_seconds = retry_seconds
        self._open = 0
        self._listening = self._closed = False
        self._retry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting; existing connections continue."""
        self._pause()
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self.sock.close()

    async def wait_closed(self) -> None:
        """Return when connections that were being opened are served or have failed."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _resume(self) -> None:
        if not self._listening and not self._closed:
            self._loop.add_reader(self.sock, self._accept)
            self._listening = True

    def _pause(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._listening:
            self._loop.remove_reader(self.sock)
            self._listening = False

    def _accept(self) -> None:
        for _ in range(BATCH):
            if self._open >= self._cap:
                self._pause()
                self._on_pause(None)
                return
            try:
                connection, _ = self.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._pause()
                self._retry = self._loop.call_later(self._retry_seconds, self._resume)
                self._on_pause(error)
                return
            if not self._admit(connection):
                connection.close()
                continue
            connection.setblocking(False)
            self._open += 1
            task = self._loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._open -= 1
                self._resume()

        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make(release),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if self._tls else None,
            )
        except (OSError, asyncio.CancelledError):
            connection.close()
            release()  # a failed handshake: there is no protocol to report its end


log = structlog.get_logger("orch.api")

HEAD_SECONDS = 10.0
"""A connection without a whole request head after this time, from its start or the head's first byte, is closed."""

LATE_BODY_SECONDS = BODY_SECONDS + 5.0
"""Time for a body. The gate answers a late body; this is for bodies that no route reads."""

MAX_CONNECTIONS = 4096
"""The maximum of a listener's connections, and never more than a quarter of the process's descriptors."""

GUEST_RATE, GUEST_BURST = 50, 200
"""New connections a second that a user of a Unix socket but its owner may make for long, and at once."""

MAX_READERS = 128
MANY_FILES = 65536

KEEP_ALIVE_SECONDS = 5
STOP_SECONDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Time in which a connection must send a request."""

    head_seconds: float = HEAD_SECONDS
    body_seconds: float = LATE_BODY_SECONDS


class OrchProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with the peer of a Unix socket, and with a deadline for every request's head and body.

    uvicorn's own deadline, the one between two requests, ends at the first byte of the next one.
    """

    release: Callable[[], None]
    deadlines: Deadlines
    guests: Guests
    _receiving: _Receiving | None = None
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's declaration
        """Record the peer before the first request, for the gate."""
        super().connection_made(transport)
        peer = _peer(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "peer": peer}
        if peer is not None:
            self.guests.count(peer.uid, self)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer, and make room for another connection."""
        self._set_deadline(None)
        super().connection_lost(exc)
        self.release()

    def data_received(self, data: bytes) -> None:
        """Set a deadline while a request has begun and is not complete."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Set the deadline of the next request, which may have begun already."""
        super().on_response_complete()
        self._watch()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Pass the connection to the protocol of sessions, which calls ``release``; no further request is expected."""
        self._set_deadline(None)
        self.ws_protocol_class = functools.partial(WebSocketSession, release=self.release)  # type: ignore[assignment]  # uvicorn declares a class
        super().handle_websocket_upgrade(event)

    def _watch(self) -> None:
        if self.transport.get_protocol() is not self:
            return  # passed on
        state, receiving = self.conn.their_state, None
        if state is h11.SEND_BODY:
            receiving = _Receiving.BODY
        elif state is h11.IDLE and (self.scope is None or self.conn.trailing_data[0]):
            receiving = _Receiving.HEAD
        if receiving is not self._receiving:
            self._set_deadline(receiving)

    def _set_deadline(self, receiving: _Receiving | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        seconds = {_Receiving.HEAD: self.deadlines.head_seconds, _Receiving.BODY: self.deadlines.body_seconds}
        self._receiving = receiving
        self._deadline = None if receiving is None else self.loop.call_later(seconds[receiving], self._give_up)

    def _give_up(self) -> None:
        self.transport.abort()


class Guests:
    """Bounds the connections of each user of a Unix socket but its owner, open ones and new ones a second: no user keeps the others out.

    ``clock`` gives monotonic seconds.
    """

    def __init__(self, most: int, owner_uid: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._owner_uid = owner_uid
        self._clock = clock
        self._open: Counter[int] = Counter()
        self._burst: dict[int, tuple[float, float]] = {}
        """For each user: how many connections may follow at once, and when that was so."""

    def admit(self, connection: socket.socket) -> bool:
        """Return whether the user at the other end may have this connection."""
        known = credentials(connection)
        if known is None or known[1] == self._owner_uid:
            return True
        uid, now = known[1], self._clock()
        left, at = self._burst.get(uid, (float(GUEST_BURST), now))
        left = min(float(GUEST_BURST), left + (now - at) * GUEST_RATE)
        admitted = left >= 1.0 and self._open[uid] < self._most
        self._burst[uid] = left - admitted, now
        return admitted

    def count(self, uid: int, connection: OrchProtocol) -> None:
        """Count the connection as the user's until it is released."""
        self._open[uid] += 1
        release = connection.release

        def released() -> None:
            self._open[uid] -= 1
            release()

        connection.release = released


class _Receiving(Enum):
    HEAD = "head"
    BODY = "body"


def _peer(sock: socket.socket | None) -> Peer | None:
    known = None if sock is None else credentials(sock)
    return None if known is None else Peer(pid=known[0], uid=known[1], gid=known[2])


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers and without its ten wake-ups a second, with a cap of connections."""

    def __init__(
        self, config: uvicorn.Config, cap: int, deadlines: Deadlines, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._deadlines = deadlines
        self.ready = asyncio.Event()
        self.stop = asyncio.Event()
        self._cap = cap
        self._guests = Guests(max(cap // 8, 8), os.getuid())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = [
            Acceptor(  # type: ignore[misc]  # as asyncio's
                sock, self._protocol, cap=self._cap, tls=self._tls, admit=self._guests.admit, on_pause=_Pauses(sock)
            )
            for sock in sockets or ()
        ]
        self.started = True

    def _protocol(self, release: Callable[[], None]) -> OrchProtocol:
        made = OrchProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        made.release = release
        made.deadlines = self._deadlines
        made.guests = self._guests
        return made

    async def main_loop(self) -> None:
        self.ready.set()
        await self.stop.wait()


class _Pauses:
    """Logs the pauses of one listener, a line a minute at most."""

    def __init__(self, sock: socket.socket) -> None:
        self._name = str(sock.getsockname())
        self._again_at = 0.0

    def __call__(self, error: OSError | None) -> None:
        if time.monotonic() < self._again_at:
            return
        self._again_at = time.monotonic() + 60.0
        reason = "as many connections as it may have" if error is None else error.strerror
        log.warning("api.accept_paused", listener=self._name, reason=reason)


def connection_cap() -> int:
    """Return how many connections a listener may have, by the process's descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(16, min(MAX_CONNECTIONS, soft // 4))


def raise_file_limit() -> None:
    """Raise the limit of descriptors to the hard limit, MANY_FILES at most; a higher limit is unchanged."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ApiServer:
    """Serves one application on bound sockets, and closes them at the end.

    ``cap`` bounds the connections of each socket; by default it follows from the process's descriptors.
    ``sessions``: WebSockets are served, too. ``tls`` encrypts every connection.
    """

    def __init__(
        self,
        app: ASGIApp,
        sockets: Sequence[socket.socket],
        *,
        cap: int | None = None,
        deadlines: Deadlines | None = None,
        sessions: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sockets = list(sockets)
        self._server = _Server(
            uvicorn.Config(
                framed(app),
                http=OrchProtocol,
                ws=WebSocketSession if sessions else "none",
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_ping_interval=None,
                ws_per_message_deflate=False,
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=STOP_SECONDS,
            ),
            connection_cap() if cap is None else cap,
            deadlines or Deadlines(),
            tls,
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start serving; return once requests are answered."""
        self._task = asyncio.create_task(self._server.serve(sockets=self._sockets), name="orch-api")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait([self._task, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Stop accepting, let running requests end (held ones end by ``closing``), close the sockets."""
        if self._task is not None:
            self._server.stop.set()
            await self._task
        for sock in self._sockets:
            sock.close()


def bind_tcp(host: str, port: int, *, option: str = "") -> socket.socket:
    """Return a listening TCP socket; port 0 picks one. ``option`` is the command line's option for it, for the error.

    Raises BadRequestError for an invalid address, RefusedError for a port that is taken.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise BadRequestError(
            f"{host!r} is not an address: {error.strerror}", hint="write one like 127.0.0.1"
        ) from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(512)
    except OSError as error:
        sock.close()
        remedy = f"`{option} {host}:0` takes any free port" if option else "choose another port, or 0 for any free one"
        raise RefusedError(f"cannot listen on {host}:{port}: {error.strerror}", hint=remedy) from error
    return sock


def host_names(host: str) -> frozenset[str]:
    """Return the names that the Host header of a request to a listener on ``host`` may carry."""
    host = host.strip("[]").lower()
    return LOOPBACK_NAMES | {f"[{host}]" if ":" in host else host}


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a listener on ``host``."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def address_of(sock: socket.socket) -> str:
    """Return the ``host:port`` of a bound TCP socket."""
    name: Any = sock.getsockname()
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{host}:{name[1]}"
