"""What is asked of a session and what comes out of it, as the daemon and a rank's actor exchange it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

READ_BYTES: Final = 256 * 1024
"""The most that one answer holds, and that a session keeps for its reader before it lets the writer wait."""

SIGNALS: Final = frozenset(
    int(number)
    for number in (
        *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM),
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP),
    )
)
"""What may be sent to a session's command."""


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


SessionRequest = CommandRequest | PortRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Bytes for a session."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfInput:
    """No more input follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The client's terminal has another size."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A signal for a session's command."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The client is gone: the session ends."""


SessionMessage = Input | EndOfInput | Size | Signal | Leave


class EndReason(StrEnum):
    """Why a session is over."""

    EXITED = "exited"
    """Its command ended, or the other side closed the connection."""

    RANK_ENDED = "rank_ended"
    """The rank did."""

    ABANDONED = "abandoned"
    """Its client is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """The end of a session; a command that ended has one of ``exit_code`` and ``signal``."""

    reason: EndReason
    exit_code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutput:
    """What a session has put out since the last answer; with ``end`` it is the last one."""

    stdout: bytes = b""
    stderr: bytes = b""
    end: SessionEnd | None = None


class SessionRefusedError(Exception):
    """A session that cannot be opened or used; ``what`` and ``remedy`` are for people."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)
        self.what, self.remedy = what, remedy
