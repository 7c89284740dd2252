"""The client's end of a session beside a rank, over a WebSocket: input and controls one way, output and the end the other.

Whole messages, without blocking once it is open. Unsent data is buffered until the daemon takes it; the caller checks
``waiting`` before it reads more input.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from orchestrator.api.errors import OrchError, ProtocolMismatchError, RequestTooLargeError, error_from_json
from orchestrator.api.protocol import API_PREFIX, PROTOCOL_HEADER, PROTOCOL_VERSION, SESSION_READ_SECONDS
from orchestrator.api.transport.wire import (
    RECEIVE_BYTES,
    ConnectionLostError,
    check_protocol,
    check_running,
    connect,
    host_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wsproto.events import Event

    from orchestrator.api.transport.endpoint import Endpoint


class WebSocket:
    """An open connection to ``path`` under the API. Raises the daemon's error, ConnectionLostError when it breaks."""

    def __init__(self, endpoint: Endpoint, path: str, *, deadline: float) -> None:
        self.label = endpoint.label
        self._endpoint = endpoint
        self._deadline: float | None = deadline
        self._ws = WSConnection(ConnectionType.CLIENT)
        self._events: list[Event] = []
        self._parts: list[str | bytes] = []
        self._unsent = bytearray()
        self._socket = connect(endpoint, deadline)
        try:
            self._handshake(API_PREFIX + path)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the connection's descriptor, for pollers."""
        return self._socket.fileno()

    @property
    def ready(self) -> bool:
        """Whether ``messages`` has a result without another byte."""
        return bool(self._events)

    @property
    def waiting(self) -> int:
        """Return how many bytes the daemon has not taken yet."""
        return len(self._unsent)

    def send(self, message: str | bytes) -> None:
        """Send a message, now or as soon as ``flush`` can."""
        self._queue(TextMessage(data=message) if isinstance(message, str) else BytesMessage(data=message))
        self.flush()

    def flush(self) -> None:
        """Send what the daemon takes now."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            if self._deadline is None:
                raise ConnectionLostError(f"the daemon at {self.label} broke the connection: {error}") from error
            self._unsent.clear()  # its last messages are read next

    def messages(self) -> Iterator[str | bytes] | None:
        """Return whole messages that have arrived; None without any. Waits only before ``set_nonblocking``."""
        if not self._events:
            data = self._receive()
            if data is None:
                return None
            self._take(data)
        return self._whole()

    def set_nonblocking(self) -> None:
        """Make ``messages`` non-blocking from now on."""
        self._deadline = None
        self._socket.setblocking(False)

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def reject_foreign_peer(self) -> NoReturn:
        """Raise for a peer that is not an orch daemon."""
        raise ProtocolMismatchError(f"the process that listens at {self.label} does not use orch's protocol")

    def _whole(self) -> Iterator[str | bytes]:
        while self._events:
            event = self._events.pop(0)
            match event:
                case Ping():
                    self._queue(event.response())
                    self.flush()
                case CloseConnection():
                    raise self._closed(event)
                case TextMessage() | BytesMessage():
                    self._parts.append(event.data if isinstance(event, TextMessage) else bytes(event.data))
                    if event.message_finished:
                        parts, self._parts = self._parts, []
                        yield "".join(parts) if isinstance(event, TextMessage) else b"".join(parts)  # type: ignore[arg-type]  # of one kind
                case _:
                    pass

    def _closed(self, event: CloseConnection) -> OrchError:
        if event.code == CloseReason.MESSAGE_TOO_BIG:
            return RequestTooLargeError("the command is too long", hint="put it into a script of the working directory")
        return ConnectionLostError(f"the daemon at {self.label} closed the session")

    def _receive(self) -> bytes | None:
        if self._deadline is not None:
            self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            check_running(self._socket, self.label)
            raise ConnectionLostError(f"the daemon at {self.label} broke the connection: {error}") from error
        if not data:
            raise ConnectionLostError(f"the daemon at {self.label} went away in the middle of a session")
        return data

    def _take(self, data: bytes) -> None:
        try:
            self._ws.receive_data(data)
            self._events += self._ws.events()
        except RemoteProtocolError:
            self.reject_foreign_peer()

    def _queue(self, event: Event) -> None:
        with suppress(LocalProtocolError):  # the daemon has already closed; its last messages are read next
            self._unsent += self._ws.send(event)

    def _handshake(self, path: str) -> None:
        host = "localhost" if self._endpoint.socket_path else host_header(self._endpoint)
        headers = [(PROTOCOL_HEADER.encode(), str(PROTOCOL_VERSION).encode())]
        if self._endpoint.token:
            headers.append((b"Authorization", f"Bearer {self._endpoint.token}".encode("latin-1")))
        self._queue(Request(host=host, target=path, extra_headers=headers))
        self.flush()
        refused: RejectConnection | None = None
        body = b""
        while True:
            while self._events:
                match event := self._events.pop(0):
                    case AcceptConnection():
                        check_protocol(_headers(event.extra_headers), self._endpoint)
                        return
                    case RejectConnection():
                        refused = event
                    case RejectData():
                        body += event.data
                    case _:
                        self.reject_foreign_peer()
                if refused is not None and (not refused.has_body or getattr(event, "body_finished", False)):
                    check_protocol(_headers(refused.headers), self._endpoint)
                    raise _refusal(body, self.label)
            self._take(self._receive() or b"")


def _refusal(body: bytes, label: str) -> OrchError:
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        return error_from_json(answer)
    return ProtocolMismatchError(f"the daemon at {label} is of an earlier version, which opens no sessions")


def _headers(pairs: Any) -> dict[str, str]:
    return {bytes(name).decode("latin-1").lower(): bytes(value).decode("latin-1") for name, value in pairs}


MAX_WAITING_BYTES = 64 * 1024
"""A caller reads no input while this much is unsent: the output of a command that reads nothing must still be shown."""

SILENCE_SECONDS = 6 * SESSION_READ_SECONDS
STDOUT, STDERR = 1, 2


class Output(NamedTuple):
    """Output of the session; ``stream`` is STDOUT or STDERR."""

    stream: int
    data: bytes


class End(NamedTuple):
    """The end of the session: the reason, and how its command ended."""

    reason: str
    exit_code: int | None
    signal: int | None


class SessionStream:
    """An open session. Raises the daemon's errors, ConnectionLostError when the connection breaks."""

    def __init__(
        self, endpoint: Endpoint, path: str, opening: Mapping[str, Any], *, deadline_seconds: float = 90.0
    ) -> None:
        self._held: OrchError | None = None
        self._socket = WebSocket(endpoint, path, deadline=time.monotonic() + deadline_seconds)
        try:
            self._socket.send(json.dumps(opening))
            self.opened = self._answer()
        except BaseException:
            self._socket.close()
            raise
        self._socket.set_nonblocking()
        self._heard_at = time.monotonic()

    def fileno(self) -> int:
        """Return the connection's descriptor, for pollers."""
        return self._socket.fileno()

    @property
    def ready(self) -> bool:
        """Whether ``receive`` has a result without another byte."""
        return self._held is not None or self._socket.ready

    @property
    def waiting(self) -> int:
        """Return how many bytes the daemon has not taken yet; ``flush`` sends them."""
        return self._socket.waiting

    def flush(self) -> None:
        """Send what the daemon takes now."""
        self._socket.flush()

    def write(self, data: bytes) -> None:
        """Send input to the session."""
        self._socket.send(data)

    def end_input(self) -> None:
        """End the input."""
        self._socket.send(json.dumps({"end_input": True}))

    def resize(self, rows: int, columns: int) -> None:
        """Send the size of this side's terminal."""
        self._socket.send(json.dumps({"resize": [rows, columns]}))

    def signal(self, number: int) -> None:
        """Send a signal to the session's command."""
        self._socket.send(json.dumps({"signal": int(number)}))

    def receive(self) -> list[Output | End]:
        """Return what has arrived; nothing follows an End. Raises the daemon's error, and ConnectionLostError after a silence."""
        if self._held is not None:
            raise self._held
        found: list[Output | End] = []
        try:
            messages = self._socket.messages()
            if messages is None:
                self._check_silence()
                return found
            self._heard_at = time.monotonic()
            for message in messages:
                one = self._output(message) if isinstance(message, bytes) else self._control(message)
                if one is not None:
                    found.append(one)
                if isinstance(one, End):
                    break
        except OrchError as error:
            if not found:
                raise
            self._held = error  # the output before it is returned first
        return found

    def close(self) -> None:
        """Disconnect: the session ends."""
        self._socket.close()

    def _check_silence(self) -> None:
        if time.monotonic() - self._heard_at > SILENCE_SECONDS:
            raise ConnectionLostError(f"the daemon at {self._socket.label} has sent nothing for {SILENCE_SECONDS:.0f}s")

    def _answer(self) -> dict[str, Any]:
        """Read the daemon's answer to the request."""
        while True:
            for message in self._socket.messages() or ():
                answer = self._parsed(message)
                if "error" in answer:
                    raise error_from_json(answer["error"])
                opened = answer.get("opened")
                return opened if isinstance(opened, dict) else self._socket.reject_foreign_peer()

    def _output(self, message: bytes) -> Output | None:
        return Output(message[0], message[1:]) if message else None

    def _control(self, message: str) -> End | None:
        control = self._parsed(message)
        if "error" in control:
            raise error_from_json(control["error"])
        ended = control.get("ended")
        if not isinstance(ended, dict):
            return None
        return End(str(ended.get("reason")), _number(ended.get("exit_code")), _number(ended.get("signal")))

    def _parsed(self, message: str | bytes) -> dict[str, Any]:
        try:
            parsed = json.loads(message)
        except (ValueError, RecursionError):
            parsed = None
        return parsed if isinstance(parsed, dict) else self._socket.reject_foreign_peer()


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= 255 else None
