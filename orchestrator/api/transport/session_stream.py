"""The client's end of a session beside a rank: input and controls one way, output and the end the other way."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.api.errors import OrchError, error_from_json
from orchestrator.api.protocol import SESSION_READ_SECONDS
from orchestrator.api.transport.web_socket import WebSocket
from orchestrator.api.transport.wire import ConnectionLostError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.api.transport.endpoint import Endpoint

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
