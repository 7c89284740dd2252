"""The client's end of a session beside a rank: a WebSocket that never blocks, over the control socket or TCP.

What is sent waits in memory until the daemon takes it, and the caller stops reading its own input meanwhile: a command that reads
nothing must not keep its own output from being shown.
"""

from __future__ import annotations

import json
import time
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
from wsproto.utilities import RemoteProtocolError

from orchestrator.api.errors import OrchError, ProtocolMismatchError, error_from_json
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
    from collections.abc import Mapping

    from wsproto.events import Event

    from orchestrator.api.transport.endpoint import Endpoint

MAX_WAITING_BYTES = 64 * 1024
"""A caller reads no more input while this much waits to be sent."""

SILENCE_SECONDS = 6 * SESSION_READ_SECONDS
STDOUT, STDERR = 1, 2


class Output(NamedTuple):
    """What the session has put out; ``stream`` is STDOUT or STDERR."""

    stream: int
    data: bytes


class End(NamedTuple):
    """The session is over: why, and how its command ended."""

    reason: str
    exit_code: int | None
    signal: int | None


class SessionStream:
    """An open session. Raises the daemon's errors, ConnectionLostError when the connection breaks."""

    def __init__(
        self, endpoint: Endpoint, path: str, opening: Mapping[str, Any], *, deadline_seconds: float = 90.0
    ) -> None:
        self._label = endpoint.label
        self._early: list[Event] = []
        self._endpoint = endpoint
        deadline = time.monotonic() + deadline_seconds
        self._socket = connect(endpoint, deadline)
        try:
            self._shake_hands(API_PREFIX + path, deadline)
            self._text(opening)
            self.opened: dict[str, Any] = self._answer(deadline)
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self.heard_at = time.monotonic()

    def fileno(self) -> int:
        """The connection's descriptor, for pollers."""
        return self._socket.fileno()

    @property
    def ready(self) -> bool:
        """Whether ``receive`` has something to tell without another byte."""
        return bool(self._early)

    @property
    def waiting(self) -> int:
        """How many bytes the daemon has not taken yet."""
        return len(self._unsent)

    def write(self, data: bytes) -> None:
        """Input for the session."""
        self._unsent += self._ws.send(BytesMessage(data=data))
        self.flush()

    def end_input(self) -> None:
        """No more input follows."""
        self._text({"end_input": True})
        self.flush()

    def resize(self, rows: int, columns: int) -> None:
        """The size of this side's terminal."""
        self._text({"resize": [rows, columns]})
        self.flush()

    def signal(self, number: int) -> None:
        """A signal for the session's command."""
        self._text({"signal": int(number)})
        self.flush()

    def flush(self) -> None:
        """Send what the daemon takes now."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLostError(f"the daemon at {self._label} broke the connection: {error}") from error

    def receive(self) -> list[Output | End]:
        """What has come. Raises the daemon's error, and ConnectionLostError after a silence."""
        if self._early:  # came with the answer to the request
            events, self._early = self._early, []
            return self._all_found(events)
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            self._mind_silence()
            return []
        except OSError as error:
            raise ConnectionLostError(f"the daemon at {self._label} broke the connection: {error}") from error
        self.heard_at = time.monotonic()
        if not data:
            raise ConnectionLostError(f"the daemon at {self._label} went away in the middle of a session")
        return self._all_found(self._events(data))

    def _all_found(self, events: list[Event]) -> list[Output | End]:
        found: list[Output | End] = []
        for number, event in enumerate(events):
            try:
                one = self._found(event)
            except OrchError:
                if not found:
                    raise
                self._early = events[number:]  # what came before it counts first
                return found
            if one is not None:
                found.append(one)
            if isinstance(one, End):
                break
        return found

    def close(self) -> None:
        """Leave: the session ends."""
        self._socket.close()

    def _mind_silence(self) -> None:
        if time.monotonic() - self.heard_at > SILENCE_SECONDS:
            check_running(self._socket, self._label)
            raise ConnectionLostError(f"the daemon at {self._label} has said nothing for {SILENCE_SECONDS:.0f}s")

    def _shake_hands(self, path: str, deadline: float) -> None:
        host = "localhost" if self._endpoint.socket_path else host_header(self._endpoint)
        headers = [(PROTOCOL_HEADER.encode(), str(PROTOCOL_VERSION).encode())]
        if self._endpoint.token:
            headers.append((b"Authorization", f"Bearer {self._endpoint.token}".encode("latin-1")))
        self._ws = WSConnection(ConnectionType.CLIENT)
        self._texts: dict[type, Any] = {TextMessage: "", BytesMessage: b""}
        self._unsent = bytearray()
        self._socket.sendall(self._ws.send(Request(host=host, target=path, extra_headers=headers)))
        refused: RejectConnection | None = None
        body = b""
        while True:
            for event in self._next_events(deadline):
                if isinstance(event, AcceptConnection):
                    check_protocol(_headers(event.extra_headers), self._endpoint)
                    return
                if isinstance(event, RejectConnection):
                    refused = event
                if isinstance(event, RejectData):
                    body += event.data
                if refused is not None and (not refused.has_body or getattr(event, "body_finished", False)):
                    check_protocol(_headers(refused.headers), self._endpoint)
                    raise self._refusal(body)

    def _refusal(self, body: bytes) -> Exception:
        try:
            told = json.loads(body)
        except ValueError:
            told = None
        if isinstance(told, dict):
            return error_from_json(told)
        return ProtocolMismatchError(
            f"the daemon at {self._label} opens no sessions", hint="it is of an earlier version: `orch down`, `orch up`"
        )

    def _answer(self, deadline: float) -> dict[str, Any]:
        """What the daemon says of the request."""
        while self._unsent:
            self.flush()
        while True:
            events = self._next_events(deadline)
            for number, event in enumerate(events):
                if not isinstance(event, TextMessage):
                    self._not_orch()
                said = self._parsed(event)
                if said is None:
                    continue
                if not isinstance(said, dict) or not isinstance(said.get("opened", {}), dict):
                    self._not_orch()
                if "error" in said:
                    raise error_from_json(said["error"])
                self._early = events[number + 1 :]
                return dict(said.get("opened", {}))

    def _next_events(self, deadline: float) -> list[Event]:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except OSError as error:
            check_running(self._socket, self._label)
            raise ConnectionLostError(f"the daemon at {self._label} did not answer: {error}") from error
        if not data:
            raise ConnectionLostError(f"the daemon at {self._label} went away before it answered")
        return self._events(data)

    def _events(self, data: bytes) -> list[Event]:
        try:
            self._ws.receive_data(data)
            return list(self._ws.events())
        except RemoteProtocolError:
            self._not_orch()

    def _found(self, event: Event) -> Output | End | None:
        match event:
            case Ping():
                self._unsent += self._ws.send(event.response())
                self.flush()
            case CloseConnection():
                raise ConnectionLostError(f"the daemon at {self._label} closed the session")
            case BytesMessage():
                return self._output(event)
            case TextMessage() if isinstance(said := self._parsed(event), dict):
                if "error" in said:
                    raise error_from_json(said["error"])
                if isinstance(ended := said.get("ended"), dict):
                    return End(str(ended.get("reason")), ended.get("exit_code"), ended.get("signal"))
            case _:
                pass
        return None

    def _output(self, event: BytesMessage) -> Output | None:
        self._texts[BytesMessage] += bytes(event.data)
        if not event.message_finished:
            return None
        data, self._texts[BytesMessage] = self._texts[BytesMessage], b""
        return Output(data[0], data[1:]) if data else None

    def _parsed(self, event: TextMessage) -> Any:
        self._texts[TextMessage] += event.data
        if not event.message_finished:
            return None
        text, self._texts[TextMessage] = self._texts[TextMessage], ""
        try:
            return json.loads(text)
        except ValueError:
            self._not_orch()

    def _text(self, value: Mapping[str, Any]) -> None:
        self._unsent += self._ws.send(TextMessage(data=json.dumps(value)))

    def _not_orch(self) -> NoReturn:
        raise ProtocolMismatchError(f"what listens at {self._label} does not speak orch's protocol")


def _headers(pairs: Any) -> dict[str, str]:
    return {bytes(name).decode("latin-1").lower(): bytes(value).decode("latin-1") for name, value in pairs}
