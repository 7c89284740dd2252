"""Sessions beside a rank over a WebSocket: the request that opens one, then bytes and control messages both ways.

The client's first message is the request (``OpenRequest``); the answer is ``{"opened": ...}``, or ``{"error": PROBLEM}``
and the end. After that, a binary message of the client is input; a binary message of the daemon is output, its first
byte 1 (standard output, a terminal, a connection) or 2 (standard error). The last message is ``{"ended": ...}`` or
``{"error": ...}``.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import structlog
from fastapi import WebSocket, WebSocketDisconnect
from msgspec import Meta
from msgspec.structs import asdict
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from orchestrator.api.errors import (
    BadRequestError,
    DaemonStoppingError,
    DeadlineError,
    InternalError,
    NotPermittedError,
    OrchError,
)
from orchestrator.api.protocol import API_PREFIX, BODY_SECONDS, SESSION_READ_SECONDS
from orchestrator.api.requests import LongText, Rank, refused, request_of
from orchestrator.api.server.audit import audited
from orchestrator.api.server.gate import FAILED, STOPPING
from orchestrator.api.server.ownership import REF_PATTERN, from_path, own_job_view
from orchestrator.api.service import Caller
from orchestrator.core.codec import Record
from orchestrator.core.ids import JobId
from orchestrator.runtime.ranks.session_messages import (
    SIGNALS,
    AttachRequest,
    CommandRequest,
    EndOfInput,
    Input,
    PortRequest,
    SessionRequest,
    Signal,
    Size,
    Terminal,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fastapi import FastAPI

    from orchestrator.api.service import JobService, SessionChannel

MAX_MESSAGE_BYTES: Final = 256 * 1024
"""The largest message that a client may send."""

SILENT_PEER_MILLISECONDS: Final = 60_000
"""A peer over TCP that acknowledges nothing for this time is lost; the daemon sends data every few seconds."""


class WebSocketSession(WSProtocol):
    """WebSocket protocol of a session that calls ``release`` when the connection is lost."""

    def __init__(self, *, release: Callable[[], None], **settings: Any) -> None:
        super().__init__(**settings)
        self._release = release

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's declaration
        """Set the timeout by which the kernel detects that a peer over TCP is lost."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_PEER_MILLISECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room for another connection."""
        super().connection_lost(exc)
        self._release()


log = structlog.get_logger("orch.api")

R = TypeVar("R")
Side = Annotated[int, Meta(ge=0, le=10_000)]
Arguments = Annotated[tuple[LongText, ...], Meta(max_length=4096)]


class TerminalRequest(Record):
    """The client's terminal."""

    rows: Side
    columns: Side
    kind: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._+-]{1,64}\Z")] = "dumb"


class OpenCommand(Record):
    """A command; without ``argv``, a shell."""

    argv: Arguments = ()
    terminal: TerminalRequest | None = None


class OpenAttach(Record):
    """The rank's own terminal."""

    terminal: TerminalRequest | None = None


class OpenRequest(Record):
    """Request for a session: a command, the rank's own terminal, or a connection to a port of the rank's node."""

    rank: Rank = 0
    command: OpenCommand | None = None
    attach: OpenAttach | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None

    @property
    def what(self) -> str:
        """The kind of session."""
        return f"port {self.port}" if self.port is not None else "attach" if self.attach is not None else "command"

    def request(self, *, secrets: bool) -> SessionRequest:
        """Return the runtime's record. Raises BadRequestError unless it is one of the three."""
        if sum(one is not None for one in (self.command, self.attach, self.port)) != 1:
            raise BadRequestError("a session is a command, attach or a port", hint="send one of them")
        if self.port is not None:
            return PortRequest(port=self.port)
        if self.attach is not None:
            return AttachRequest(terminal=_terminal(self.attach.terminal), secrets=secrets)
        assert self.command is not None
        return CommandRequest(argv=self.command.argv, terminal=_terminal(self.command.terminal), secrets=secrets)


def _terminal(asked: TerminalRequest | None) -> Terminal | None:
    return None if asked is None else Terminal(**asdict(asked))


class ControlRequest(Record):
    """A message about an open session; one of the three."""

    resize: tuple[Side, Side] | None = None
    signal: Rank | None = None
    end_input: bool = False


def add_session_routes(app: FastAPI, service: JobService, closing: asyncio.Event) -> None:
    """Add the route of sessions."""

    @app.websocket(f"{API_PREFIX}/jobs/{{ref}}/session")
    async def session(socket: WebSocket, ref: str) -> None:
        caller = getattr(socket.state, "caller", None)
        if not isinstance(caller, Caller):
            raise NotPermittedError("the caller is not authenticated")
        await socket.accept()
        with suppress(WebSocketDisconnect, RuntimeError):  # Starlette's errors for a client that disconnected
            try:
                channel = await _opened(socket, _checked(ref), service, caller)
                await _Session(socket, channel).run(closing)
            except OrchError as error:
                await _note(socket, error)
                await _send(socket, {"error": error.to_json()})
            except (WebSocketDisconnect, RuntimeError):
                raise
            except Exception:
                log.exception("api.session_failed", job=ref)
                await _send(socket, {"error": InternalError(FAILED).to_json()})
            await socket.close()


def _checked(ref: str) -> str:
    if re.fullmatch(REF_PATTERN, ref) is None:
        raise BadRequestError(f"{ref!r} names no job", hint="give an id, the beginning of one, or a name")
    return from_path(ref)


async def _opened(socket: WebSocket, ref: str, service: JobService, caller: Caller) -> SessionChannel:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = _parsed(OpenRequest, await socket.receive_text())
    except TimeoutError as error:
        raise DeadlineError("the client did not send its request in time", hint="send it again") from error
    except KeyError as error:
        raise BadRequestError("the first message is text", hint="see docs/api.md") from error
    record = audited(socket)
    record.job, record.detail = await service.resolve(ref, caller), body.what
    job = await own_job_view(service, ref, caller, "enter")
    channel = await service.open_session(JobId(job.id), body.rank, body.request(secrets=job.uid == caller.uid), caller)
    await record.write(101)
    try:
        await _send(socket, {"opened": {"job_id": job.id, "rank": body.rank}})
    except BaseException:
        await channel.close()
        raise
    return channel


async def _note(socket: WebSocket, error: OrchError) -> None:
    """Write the line of a session that was not opened."""
    audited(socket).result = error.code
    await audited(socket).write(error.http_status)


class _Session:
    """Carries messages between a client and an open session until one of them ends."""

    def __init__(self, socket: WebSocket, channel: SessionChannel) -> None:
        self._socket, self._channel = socket, channel

    async def run(self, closing: asyncio.Event) -> None:
        """Return at the session's end. Raises DaemonStoppingError, and what the channel and the client's messages raise."""
        works: tuple[Coroutine[Any, Any, Any], ...] = (self._out(), self._in(), closing.wait())
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not tasks[0].done() and tasks[2].done():
                raise DaemonStoppingError(STOPPING)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._channel.close()

    async def _out(self) -> None:
        while True:
            output = await self._channel.read(SESSION_READ_SECONDS)
            if output.stdout:
                await self._socket.send_bytes(b"\x01" + output.stdout)
            if output.stderr:
                await self._socket.send_bytes(b"\x02" + output.stderr)
            if output.end is not None:
                await _send(self._socket, {"ended": asdict(output.end)})
                return
            if not output.stdout and not output.stderr:
                await _send(self._socket, {"alive": True})

    async def _in(self) -> None:
        """Pass on the client's messages; return when it disconnects."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            data, text = message.get("bytes"), message.get("text")
            if data:
                await self._channel.send(Input(data=data))
            elif text is not None:
                await self._control(_parsed(ControlRequest, text))

    async def _control(self, body: ControlRequest) -> None:
        if body.resize is not None:
            rows, columns = body.resize
            await self._channel.send(Size(rows=rows, columns=columns))
        if body.signal is not None:
            if body.signal not in SIGNALS:
                raise BadRequestError(f"signal {body.signal} cannot be sent", hint=f"one of {sorted(SIGNALS)}")
            await self._channel.send(Signal(number=body.signal))
        if body.end_input:
            await self._channel.send(EndOfInput())


def _parsed(kind: type[R], text: str) -> R:
    try:
        return request_of(kind, json.loads(text))
    except (json.JSONDecodeError, RecursionError):
        raise refused("it is not JSON") from None


async def _send(socket: WebSocket, value: dict[str, Any]) -> None:
    await socket.send_text(json.dumps(value, separators=(",", ":")))
