"""The gate in front of every listener: checks the caller, its origin, and the size of its request.

Pure ASGI, so that streams stay streams. A request passes if its Host and Origin are this daemon's, its caller is
authenticated (by peer credentials on a Unix socket, by a token on TCP), its protocol is this daemon's, and its body is
JSON within the limit. Only then is a route looked up: an endpoint cannot omit a check. It must not decide which user
may act on which job; that needs the job and is in ``app``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pwd
import re
from dataclasses import dataclass
from hmac import compare_digest
from typing import TYPE_CHECKING

import structlog

from orchestrator.api.errors import (
    PROBLEM_CONTENT_TYPE,
    BadRequestError,
    DeadlineError,
    ForeignOriginError,
    InternalError,
    MediaTypeError,
    MethodNotAllowedError,
    OrchError,
    ProtocolMismatchError,
    RequestTooLargeError,
    UnauthenticatedError,
)
from orchestrator.api.protocol import BODY_SECONDS, MAX_BODY_BYTES, PROTOCOL_HEADER, PROTOCOL_VERSION
from orchestrator.api.server.audit import noting
from orchestrator.api.service import Caller
from orchestrator.runtime.pools import working_for

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from orchestrator.api.server.audit import AuditLog

log = structlog.get_logger("orch.api")

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
FAILED = "the daemon failed to answer"
STOPPING = "the daemon is shutting down"
DISCARD_SECONDS = 5.0
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
_MEDIA_TYPES = frozenset({"application/json", "application/octet-stream"})
"""A browser sends a preflight request before a page of another site can send either."""

_NO_BODY = frozenset({"GET", "HEAD"})
_STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The process at the other end of a Unix socket, by its peer credentials."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePolicy:
    """The requirements of a listener.

    ``owner_uid`` owns the daemon. ``token`` is required of callers that are not on a Unix socket; with ``open_to_all``
    (reading on the loopback address) no token is needed. ``hosts`` are the names, without port, that Host may carry;
    None accepts any, which only a listener with a token may do. ``methods`` are the methods that the listener supports.
    """

    owner_uid: int
    token: str = ""
    open_to_all: bool = False
    hosts: frozenset[str] | None = LOOPBACK_NAMES
    methods: frozenset[str] = frozenset({"GET", "POST"})
    max_body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = BODY_SECONDS


class Gate:
    """ASGI middleware that passes what ``policy`` allows; it stores the caller in ``scope["state"]["caller"]``."""

    def __init__(self, app: ASGIApp, policy: GatePolicy, audit: AuditLog | None = None) -> None:
        self._app = app
        self._policy = policy
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; send the answer if it is refused."""
        if scope["type"] not in {"http", "websocket"}:
            return
        started = finished = False
        caller: Caller | None = None
        send = noting(self._audit, scope, send, lambda: caller)

        async def marked_send(message: Message) -> None:
            nonlocal started, finished
            if message["type"] == "http.response.body":
                finished = not message.get("more_body", False)
            if message["type"] in _STARTS:
                started = True
                version = (PROTOCOL_HEADER.lower().encode(), str(PROTOCOL_VERSION).encode())
                message = {**message, "headers": [*message.get("headers", ()), version]}
            await send(message)

        try:
            caller = scope.setdefault("state", {})["caller"] = self._admit(scope)
            receive = await self._bounded(scope, receive)
            with working_for(None if caller is None else caller.uid):
                await while_connected(self._app, scope, receive, marked_send)
        except OrchError as error:
            if started:
                raise
            if "audit" in scope.get("state", {}):
                scope["state"]["audit"].result = error.code
            await send_problem(error, marked_send, scope["type"])
        except Exception:
            log.exception("api.request_failed", method=_method(scope), path=scope["path"])
            if not started:
                await send_problem(InternalError(FAILED), marked_send, scope["type"])
            elif not finished:
                raise  # the server then cuts the connection: an incomplete answer must not look complete

    def _admit(self, scope: Scope) -> Caller | None:
        policy = self._policy
        headers = Headers(scope)
        if _method(scope) not in policy.methods:
            raise MethodNotAllowedError(f"{_method(scope)} is not a method of this listener")
        self._check_origin(headers)
        caller = self._caller(scope, headers)
        spoken = headers.one("x-orch-protocol")
        if spoken not in {None, str(PROTOCOL_VERSION)}:
            raise ProtocolMismatchError(f"this daemon speaks protocol {PROTOCOL_VERSION}, the client {spoken}")
        return caller

    def _check_origin(self, headers: Headers) -> None:
        host = headers.one("host") or ""
        port = _port_of(host)
        name = host.removesuffix(f":{port}") if port else host
        if self._policy.hosts is not None and name.lower() not in self._policy.hosts:
            raise ForeignOriginError(f"this daemon is not called {host!r}")
        origin = headers.one("origin")
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            raise ForeignOriginError(f"requests from pages of {origin!r} are refused")
        if headers.one("sec-fetch-site") in {"cross-site", "same-site"}:
            raise ForeignOriginError("requests from pages of another site are refused")

    def _caller(self, scope: Scope, headers: Headers) -> Caller | None:
        policy = self._policy
        peer = scope.get("state", {}).get("peer")
        if isinstance(peer, Peer):
            return Caller(
                uid=peer.uid,
                gid=peer.gid,
                pid=peer.pid,
                user=user_name(peer.uid),
                is_owner=peer.uid == policy.owner_uid,
                channel="tunnel" if _port_of(headers.one("host") or "") else "unix",
            )
        if policy.open_to_all:
            return None
        scheme, _, token = (headers.one("authorization") or "").partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        if not policy.token or scheme.lower() != "bearer" or not compare_digest(given, policy.token.encode()):
            raise UnauthenticatedError("this listener requires the daemon's token")
        return Caller(uid=policy.owner_uid, gid=-1, user=user_name(policy.owner_uid), is_owner=True, channel="tcp")

    async def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """Return a ``receive`` with the body, read here within the limits of size and time; then what follows it (a disconnect)."""
        if _method(scope) in _NO_BODY:
            return receive
        headers = Headers(scope)
        media_type = (headers.one("content-type") or "").partition(";")[0].strip().lower()
        if media_type not in _MEDIA_TYPES:
            raise MediaTypeError(f"a body of type {media_type or 'unknown'} is refused")
        limit = self._policy.max_body_bytes
        declared = headers.one("content-length")
        if declared is not None and (not re.fullmatch("[0-9]{1,18}", declared) or int(declared) > limit):
            raise RequestTooLargeError(f"a request of {declared} bytes is over the bound of {limit}")
        try:
            async with asyncio.timeout(self._policy.body_seconds):
                body = await read_body(receive, limit)
        except TimeoutError as error:
            raise DeadlineError("the request's body did not arrive in time", hint="send it again") from error
        return replay_body(body, receive)


def framed(app: ASGIApp) -> ASGIApp:
    """Return ``app`` with what holds for the bodies of all requests.

    A request whose length is given twice is refused: a proxy in front may have read another one (RFC 9112, 6.1). An answer
    that ends the connection before the body has come whole reaches a client that is still sending: what it sends is
    discarded for a while, because closing now would reset the connection and with it the answer.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]} if scope["type"] == "http" else set()
        if not names & {b"content-length", b"transfer-encoding"}:
            await app(scope, receive, send)
            return
        if names >= {b"content-length", b"transfer-encoding"}:
            twice = "a request has Content-Length or Transfer-Encoding, not both"
            await send_problem(BadRequestError(twice), send)
            return
        more, closes = True, False

        async def received() -> Message:
            nonlocal more
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def answered(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start":
                closes = (b"connection", b"close") in message["headers"]
            elif closes and more and not message.get("more_body", False):
                await send({**message, "more_body": True})
                size = 0
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DISCARD_SECONDS):
                        while more and size < MAX_DISCARDED_BYTES:
                            size += len((await received()).get("body", b""))
                message = {"type": "http.response.body"}
            await send(message)

        await app(scope, received, answered)

    return serve


async def while_connected(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a request; cancel one that only reads when its client has closed the connection.

    A request that changes something runs to its end, so that nothing is left half done.
    """
    if scope["type"] != "http" or _method(scope) not in _NO_BODY:
        await app(scope, receive, send)
        return
    gone = asyncio.ensure_future(_disconnected(receive))

    async def received() -> Message:
        await asyncio.shield(gone)
        return {"type": "http.disconnect"}

    work = asyncio.ensure_future(app(scope, replay_body(b"", received), send))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Receive, limit: int) -> bytes:
    """Read the whole body. Raises RequestTooLargeError, DeadlineError for a client that disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise DeadlineError("the client went away before its request was complete")
        body += message.get("body", b"")
        if len(body) > limit:
            raise RequestTooLargeError(f"the request is over the bound of {limit} bytes")
        if not message.get("more_body", False):
            return bytes(body)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that yields ``body``, then what follows it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _port_of(host: str) -> str:
    """Return the port in a Host header; empty without one.

    A client of the socket names no port. One that names a port has connected to TCP, and a forwarder (``ssh -L``)
    passes that on to the socket: the peer is the forwarder, and the client may be on another machine.
    """
    port = host.rpartition(":")[2]
    return port if ":" in host and port.isdigit() else ""


def _method(scope: Scope) -> str:
    """Return the method; a WebSocket begins with a GET."""
    return str(scope.get("method", "GET"))


class Headers:
    """Read access to a scope's headers; the values of a repeated one are joined, which makes it invalid."""

    def __init__(self, scope: Scope) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            self._values.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

    def one(self, name: str) -> str | None:
        """Return the header's value; None if there is none."""
        values = self._values.get(name)
        if values is None:
            return None
        return values[0] if len(values) == 1 else "\0".join(values)


def user_name(uid: int) -> str:
    """Return the account's name, or its number without one."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


async def send_problem(error: OrchError, send: Send, kind: str = "http") -> None:
    """Answer with the error's problem document; ``kind`` is that of the request's scope."""
    prefix = "" if kind == "http" else "websocket."
    body = json.dumps(error.to_json()).encode()
    headers = [
        (b"content-type", PROBLEM_CONTENT_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # the rest of a refused body is not read
    ]
    if isinstance(error, UnauthenticatedError):
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": f"{prefix}http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": f"{prefix}http.response.body", "body": body})
