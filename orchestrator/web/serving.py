"""Interface of the daemon to the page: an application that is created for the first browser, and links to it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.api.errors import BadRequestError, RefusedError
from orchestrator.api.page_links import PageLinkView
from orchestrator.api.server.listeners import address_of, bind_tcp, is_loopback
from orchestrator.durable_files import write_whole
from orchestrator.private_files import open_private
from orchestrator.web.sign_in import LINK_SECONDS, Reach, SignIn, SignOuts

if TYPE_CHECKING:
    import asyncio
    import ssl

    from starlette.types import ASGIApp, Receive, Scope, Send

    from orchestrator.api.launch import ServeOptions
    from orchestrator.api.server.audit import AuditLog
    from orchestrator.api.service import Caller, JobService
    from orchestrator.spec.paths import PageFiles

KEY_BYTES: Final = 32


class PageLinkMaker:
    """Makes links to the page at ``address``, a URL."""

    def __init__(self, sign_in: SignIn, address: str) -> None:
        self._sign_in = sign_in
        self._address = address

    def link(self, caller: Caller) -> PageLinkView:
        """Return a new link for ``caller``."""
        secret = self._sign_in.new_link(caller.uid)
        return PageLinkView(
            url=f"{self._address}signin?link={secret}", address=self._address, valid_seconds=LINK_SECONDS
        )


class LazyPage:
    """The page as an ASGI application; not even templates are imported before the first browser."""

    def __init__(
        self, service: JobService, sign_in: SignIn, closing: asyncio.Event, audit: AuditLog | None = None
    ) -> None:
        self._audit = audit
        self._service = service
        self._sign_in = sign_in
        self._closing = closing
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._app is None:
            from orchestrator.web.app import create_page_app

            self._app = create_page_app(
                self._service, self._sign_in, self._closing, owner_uid=os.getuid(), audit=self._audit
            )
        await self._app(scope, receive, send)


def sign_in_of(files: PageFiles, *, token: str = "", reach: Reach | None = None) -> SignIn:
    """Return the sign-in with the key of ORCH_HOME, which is created on first use. Raises NotPrivateError, OSError."""
    handle = open_private(files.key, os.O_RDONLY | os.O_CREAT)
    try:
        key = os.read(handle, KEY_BYTES)
    finally:
        os.close(handle)
    if len(key) < KEY_BYTES:
        key = os.urandom(KEY_BYTES)
        write_whole(files.key, key)
    sign_outs = SignOuts(files.signed_out)
    return SignIn(key, time.time, token=token, owner_uid=os.getuid(), reach=reach or Reach(), sign_outs=sign_outs)


def bind_page(options: ServeOptions, files: PageFiles) -> socket.socket:
    """Bind a socket for the page. Port 0 is the last used port if free, else any, so that addresses are stable.

    Raises the errors of ``page_place``, and RefusedError for a port that is in use.
    """
    host, port = page_place(options)
    if port:
        return bind_tcp(host, port, option="--page-listen")
    sock = _bind_again(host, files)
    _remember(sock, files)
    return sock


def page_place(options: ServeOptions) -> tuple[str, int]:
    """Return host and port of the page's address.

    Raises BadRequestError, and RefusedError for one that other machines could reach without encryption or token.
    """
    host, _, text = options.page_listen.rpartition(":")
    if not (host and text.isascii() and text.isdecimal() and int(text) < 2**16):
        raise BadRequestError(
            f"{options.page_listen!r} is not an address for the page", hint="write one like 127.0.0.1:8265"
        )
    if bool(options.page_cert) != bool(options.page_key):
        raise BadRequestError("--page-cert and --page-key belong together", hint="give both files, in PEM")
    if not is_loopback(host):
        _check_open(host, options)
    return host, int(text)


def _check_open(host: str, options: ServeOptions) -> None:
    if not options.page_cert and not options.page_plain:
        raise RefusedError(
            f"the page on {host} would be sent over the network in plain text",
            hint="give --page-cert and --page-key, or --page-plain behind a proxy that encrypts; or leave it on 127.0.0.1, and reach it"
            " from elsewhere with `ssh -L PORT:127.0.0.1:PORT HOST`",
        )
    if not options.token_file:
        raise RefusedError(
            f"the page on {host} needs a token, with which browsers sign in",
            hint="pass --token-file FILE, readable by you alone",
        )


def page_tls(options: ServeOptions) -> ssl.SSLContext | None:
    """Return the TLS context with the page's certificate; None without one. Raises RefusedError for unusable files."""
    if not options.page_cert:
        return None
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if Path(options.page_key).stat().st_mode & 0o007:
            raise RefusedError(
                f"--page-key {options.page_key}: every user can read the key", hint=f"chmod 0600 {options.page_key}"
            )
        context.load_cert_chain(options.page_cert, options.page_key)
    except OSError as error:  # ssl.SSLError is an OSError
        what = getattr(error, "reason", None) or error.strerror or str(error)
        raise RefusedError(
            f"--page-cert {options.page_cert} with --page-key {options.page_key}: {what}",
            hint="two PEM files: the certificate (with its chain) and its unencrypted key",
        ) from error
    return context


def reach_of(options: ServeOptions) -> Reach:
    """Return how browsers reach the page."""
    return Reach(tls=bool(options.page_cert), network=not is_loopback(page_place(options)[0]))


def shown_address(sock: socket.socket, options: ServeOptions) -> str:
    """Return the page's URL; for a listener on every address, with this machine's name."""
    host, _, port = address_of(sock).rpartition(":")
    name = socket.getfqdn() if host in {"0.0.0.0", "[::]"} else host  # noqa: S104 - compared, not bound
    return f"http{'s' if options.page_cert else ''}://{name}:{port}/"


def _bind_again(host: str, files: PageFiles) -> socket.socket:
    try:
        handle = open_private(files.port, os.O_RDONLY)
    except OSError:
        return bind_tcp(host, 0)
    try:
        last = os.read(handle, 16).decode("ascii", "replace").strip()
    finally:
        os.close(handle)
    if last.isascii() and last.isdecimal() and 1024 <= int(last) < 2**16:
        try:
            return bind_tcp(host, int(last))
        except RefusedError:
            return bind_tcp(host, 0)
    return bind_tcp(host, 0)


def _remember(sock: socket.socket, files: PageFiles) -> None:
    port = address_of(sock).rpartition(":")[2]
    handle = open_private(files.port, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(handle, f"{port}\n".encode())
    finally:
        os.close(handle)
