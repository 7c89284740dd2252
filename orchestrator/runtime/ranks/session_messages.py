"""Messages of a session between the daemon and a rank's actor."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """A client's terminal: its size in characters, and its kind (``TERM``)."""

    rows: int
    columns: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """A command in the rank's environment. ``argv`` empty: a shell. Without ``terminal``: pipes. ``secrets``: the environment holds them."""

    argv: tuple[str, ...]
    terminal: Terminal | None
    secrets: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRequest:
    """A connection to a TCP port on the rank's node."""

    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest:
    """A connection to the rank's own terminal. ``secrets``: the client may see those of the rank."""

    terminal: Terminal | None
    secrets: bool


SessionRequest = CommandRequest | PortRequest | AttachRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Bytes for a session."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfInput:
    """The end of the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The new size of the client's terminal."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A signal for a session's command."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """The end of a session; for a command that ended, one of ``exit_code`` and ``signal`` is set."""

    reason: EndReason
    exit_code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutput:
    """A session's output since the last answer; the answer with ``end`` is the last one."""

    stdout: bytes = b""
    stderr: bytes = b""
    end: SessionEnd | None = None


class SessionRefusedError(Exception):
    """A session that cannot be opened or used; ``what`` and ``remedy`` are shown to users."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)
        self.what, self.remedy = what, remedy
