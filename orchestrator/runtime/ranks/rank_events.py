"""Reports of a rank's supervisor: numbered events, and the newest of everything else. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.core.events import Exit  # noqa: TC001  # conformance.py reads the annotations

if TYPE_CHECKING:
    from orchestrator.checkpoint.repository.status import PersisterStatus
    from orchestrator.core.diagnosis.observation import ProcessSeen, StorageSeen, TerminalSeen
    from orchestrator.train.script.progress import ProgressSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent:
    """One thing that happened to the rank: ``started``, ``exited`` or ``gone``. Times are seconds since the epoch."""

    number: int
    kind: str
    at: float
    pid: int = 0
    cold: str | None = None
    """Reason for a fresh interpreter, for ``started``; ``AS_ASKED`` where the rank's plan requests one."""
    exit: Exit | None = None
    """Exit of the process, for ``exited``."""


AS_ASKED: Final = "asked for"


@dataclass(frozen=True, slots=True, kw_only=True)
class PollCursor:
    """Numbers of the last event, progress, persister status, process and terminal samples that a caller received.

    The caller keeps it, not the actor: a daemon that was killed may not have recorded what it received.
    """

    event: int = 0
    progress: int = 0
    persisted: int = 0
    processes: int = 0
    reads_page: bool = False
    """The caller reads the rank's progress page itself: a report on it alone ends no poll."""
    terminal: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PollReply:
    """Reports that are newer than the given cursor; ``cursor`` is the one for the next poll."""

    cursor: PollCursor
    events: tuple[RankEvent, ...] = ()
    progress: ProgressSnapshot | None = None
    persisted: PersisterStatus | None = None
    log_lost: str | None = None
    processes: ProcessSeen | None = None
    storage: StorageSeen | None = None
    """Sent only together with ``processes``."""
    terminal: TerminalSeen | None = None
    sent_at: float = 0.0
    """By the node's clock, as all other times."""
