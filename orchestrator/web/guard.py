"""The guard in front of the page: checks a request's origin and sign-in, and sets the headers of every answer.

Pure ASGI, so that streams stay streams. It stores the caller in ``scope["state"]["caller"]``; a request without a valid
cookie reaches only sign-in and the static files. A request that acts must carry this page's own Origin: a cookie of
another port of the same host, or a page there, is not enough.
"""

from __future__ import annotations

import asyncio
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any, Final

import structlog

from orchestrator.api.errors import (
    ForeignOriginError,
    InternalError,
    MediaTypeError,
    MethodNotAllowedError,
    OrchError,
    RefusedError,
    UnauthenticatedError,
)
from orchestrator.api.server.audit import noting
from orchestrator.api.server.gate import (
    FAILED,
    LOOPBACK_NAMES,
    Headers,
    read_body,
    replay_body,
    user_name,
    while_connected,
)
from orchestrator.api.service import Caller
from orchestrator.runtime.pools import working_for
from orchestrator.web.sign_in import REMEDY

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from orchestrator.api.server.audit import AuditLog
    from orchestrator.web.sign_in import SignIn

log = structlog.get_logger("orch.web")

MAX_FORM_BYTES: Final = 2 * 1024 * 1024
READING: Final = frozenset({"GET", "HEAD"})
OPEN_PATHS: Final = ("/signin", "/static/")
STREAMS: Final = "/live/"
MAX_STREAMS: Final = 64
"""Most open streams of one user; each open page has one or two."""

SECURITY_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """ASGI middleware. ``refusal`` renders an error for users: status, headers and body."""

    def __init__(
        self,
        app: ASGIApp,
        sign_in: SignIn,
        *,
        owner_uid: int,
        refusal: Callable[[OrchError, Caller | None], bytes],
        audit: AuditLog | None = None,
    ) -> None:
        self._audit = audit
        self._app = app
        self._sign_in = sign_in
        self._owner_uid = owner_uid
        self._refusal = refusal
        self._streams: dict[int, set[asyncio.Future[None]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; send the answer if it is refused."""
        if scope["type"] != "http":
            return
        started = finished = False
        caller: Caller | None = None
        send = noting(self._audit, scope, send, lambda: caller)

        async def with_headers(message: Message) -> None:
            nonlocal started, finished
            if message["type"] == "http.response.body":
                finished = not message.get("more_body", False)
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": _secured(message.get("headers", ()), tls=self._sign_in.reach.tls)}
            await send(message)

        try:
            headers = Headers(scope)
            self._check_origin(scope, headers)
            caller = self._caller(headers)
            if caller is None and self._sign_in.takes_token and _is_navigation(scope, headers):
                await _to_sign_in(with_headers)
                return
            _check_signed_in(caller, scope["path"])
            scope.setdefault("state", {})["caller"] = caller
            receive = await _bounded(scope, headers, receive)
            with working_for(None if caller is None else caller.uid):
                if caller is not None and scope["path"].startswith(STREAMS):
                    await self._stream(
                        caller.uid, while_connected(self._app, scope, receive, with_headers), with_headers
                    )
                    return
                await while_connected(self._app, scope, receive, with_headers)
            if caller is not None and self._sign_in.user_of(self._cookie(headers)) is None:  # he has signed out
                for stream in self._streams.pop(caller.uid, ()):
                    stream.cancel()
        except OrchError as error:
            if started:
                raise
            if "audit" in scope.get("state", {}):
                scope["state"]["audit"].result = error.code
            await self._refuse(error, caller, with_headers)
        except Exception:
            log.exception("web.request_failed", method=scope["method"], path=scope["path"])
            if started and not finished:
                raise  # the server then cuts the connection: an incomplete answer must not look complete
            if not started:
                await self._refuse(InternalError(FAILED), caller, with_headers)

    async def _stream(self, uid: int, work: Coroutine[Any, Any, None], send: Send) -> None:
        """Serve a stream, one of a bounded number, until its user signs out."""
        streams = self._streams.setdefault(uid, set())
        if len(streams) >= MAX_STREAMS:
            work.close()
            raise RefusedError(f"{MAX_STREAMS} pages of this user are kept current", hint="close some of them")
        stream = asyncio.ensure_future(work)
        streams.add(stream)
        try:
            await asyncio.wait([stream])
        finally:
            streams.discard(stream)
            if not streams and self._streams.get(uid) is streams:
                del self._streams[uid]
            stream.cancel()
        if not stream.cancelled():
            stream.result()
        else:
            await send({"type": "http.response.body", "body": b""})

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] not in READING | {"POST"}:
            raise MethodNotAllowedError(f"{scope['method']} is not a method of the page")
        host = (headers.one("host") or "").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        reach = self._sign_in.reach
        if name not in LOOPBACK_NAMES and not (reach.network and name):
            raise ForeignOriginError(f"the page is not called {host!r}")
        origin = headers.one("origin")
        if origin is None and scope["method"] == "POST":
            raise ForeignOriginError("a request that acts does not say which page it comes from")
        schemes = {"https"} if reach.tls else {"http", "https"} if reach.network else {"http"}
        if origin is not None and origin.lower() not in {f"{scheme}://{host}" for scheme in schemes}:
            raise ForeignOriginError(f"requests from pages of {origin!r} are refused")
        foreign = headers.one("sec-fetch-site") in {"cross-site", "same-site"}
        link = scope["method"] == "GET" and headers.one("sec-fetch-mode") == "navigate"
        if foreign and (not link or (scope["path"].startswith("/signin") and scope["query_string"])):
            raise ForeignOriginError(
                "requests from pages of another site are refused", hint="paste the address into the browser instead"
            )

    def _cookie(self, headers: Headers) -> str:
        try:
            found = SimpleCookie(headers.one("cookie") or "").get(self._sign_in.cookie_name)
        except CookieError:
            return ""
        return "" if found is None else found.value

    def _caller(self, headers: Headers) -> Caller | None:
        uid = self._sign_in.user_of(self._cookie(headers))
        if uid is None:
            return None
        return Caller(uid=uid, gid=-1, user=user_name(uid), is_owner=uid == self._owner_uid, channel="page")

    async def _refuse(self, error: OrchError, caller: Caller | None, send: Send) -> None:
        body = self._refusal(error, caller)
        headers = [(b"content-type", b"text/html; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        if not isinstance(error, UnauthenticatedError):
            headers.append((b"connection", b"close"))  # the rest of a refused body is not read
        await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _check_signed_in(caller: Caller | None, path: str) -> None:
    if caller is None and not path.startswith(OPEN_PATHS):
        raise UnauthenticatedError("this browser is not signed in, or was signed in too long ago", hint=REMEDY)


def _is_navigation(scope: Scope, headers: Headers) -> bool:
    opens = headers.one("sec-fetch-mode") in {None, "navigate"} and not scope["path"].startswith("/live/")
    return scope["method"] == "GET" and opens and not scope["path"].startswith(OPEN_PATHS)


async def _to_sign_in(send: Send) -> None:
    headers = [(b"location", b"/signin"), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _secured(headers: object, *, tls: bool) -> list[tuple[bytes, bytes]]:
    found = [(bytes(name), bytes(value)) for name, value in headers]  # type: ignore[attr-defined]  # ASGI's iterable
    if not any(name == b"cache-control" for name, _ in found):
        found.append((b"cache-control", b"no-store"))
    if tls:
        found.append((b"strict-transport-security", b"max-age=31536000"))
    own = {name for name, _ in found}
    ours = ((name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items())
    return [*found, *((name, value) for name, value in ours if name not in own)]


async def _bounded(scope: Scope, headers: Headers, receive: Receive) -> Receive:
    if scope["method"] in READING:
        return receive
    kind = (headers.one("content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise MediaTypeError(f"a body of type {kind or 'unknown'} is refused", hint="send the form of the page")
    return replay_body(await read_body(receive, MAX_FORM_BYTES), receive)
