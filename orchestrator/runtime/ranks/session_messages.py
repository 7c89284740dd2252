"""Messages of a session between the daemon and a rank's actor."""

from __future__ import annotations

import signal
from enum import StrEnum
from typing import Final

from orchestrator.core.codec import Count, Integer, Message, Text

READ_BYTES: Final = 256 * 1024
"""Maximum size of one answer, and of a session's buffer before its writer must wait."""

SIGNALS: Final = frozenset(
    int(number)
    for number in (
        *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM),
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP),
    )
)
"""The signals that a client may send to a session's command."""


class Terminal(Message):
    """A client's terminal: its size in characters, and its kind (``TERM``)."""

    rows: Count
    columns: Count
    kind: Text


class CommandRequest(Message, tag=True):
    """A command in the rank's environment. ``argv`` empty: a shell. Without ``terminal``: pipes. ``secrets``: the environment holds them."""

    argv: tuple[Text, ...]
    terminal: Terminal | None
    secrets: bool


class PortRequest(Message, tag=True):
    """A connection to a TCP port on the rank's node."""

    port: Count


class AttachRequest(Message, tag=True):
    """A connection to the rank's own terminal. ``secrets``: the client may see those of the rank."""

    terminal: Terminal | None
    secrets: bool


SessionRequest = CommandRequest | PortRequest | AttachRequest


class Input(Message, tag=True):
    """Bytes for a session."""

    data: bytes


class EndOfInput(Message, tag=True):
    """The end of the input."""


class Size(Message, tag=True):
    """The new size of the client's terminal."""

    rows: Count
    columns: Count


class Signal(Message, tag=True):
    """A signal for a session's command."""

    number: Count


class Leave(Message, tag=True):
    """The client has left: the session ends."""


SessionMessage = Input | EndOfInput | Size | Signal | Leave


class EndReason(StrEnum):
    """Reason for the end of a session."""

    EXITED = "exited"
    """Its command, or the rank that it was attached to, ended, or the other side closed the connection."""

    RANK_ENDED = "rank_ended"
    """The rank ended."""

    ABANDONED = "abandoned"
    """Its client left."""


class SessionEnd(Message):
    """The end of a session; for a command that ended, one of ``exit_code`` and ``signal`` is set."""

    reason: EndReason
    exit_code: Integer | None = None
    signal: Integer | None = None


class SessionOutput(Message):
    """A session's output since the last answer; the answer with ``end`` is the last one."""

    stdout: bytes = b""
    stderr: bytes = b""
    end: SessionEnd | None = None


class SessionRefusedError(Exception):
    """A session that cannot be opened or used; ``what`` and ``remedy`` are shown to users."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)
        self.what, self.remedy = what, remedy
