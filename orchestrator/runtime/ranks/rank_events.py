"""What a rank's supervisor reports: numbered events, and the newest of what is not an event. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.core.events import MemoryUse  # noqa: TC001 - the fields are checked by their types
from orchestrator.core.facts.fact import Fact  # noqa: TC001 - as above
from orchestrator.core.states import StopScope  # noqa: TC001

if TYPE_CHECKING:
    from orchestrator.checkpoint.repository.persister import PersisterStatus
    from orchestrator.train.script.progress_facts import ProgressSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent:
    """One thing that happened to the rank: ``started``, ``exited`` or ``gone``. Times are seconds since the epoch."""

    number: int
    kind: str
    at: float
    pid: int = 0
    cold: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    error_type: str = ""
    error_message: str = ""
    error_at: float | None = None
    log_tail: tuple[str, ...] = ()
    evidence: tuple[Fact, ...] = ()
    policy: str = ""
    policy_note: Fact | None = None
    missing_file: str = ""
    stop_seen_at: float | None = None
    stop_scope: StopScope | None = None
    last_step: int | None = None
    total_steps: int | None = None
    memory: MemoryUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PollCursor:
    """What an asker has been told: the number of the last event, and of the last progress and persister status.

    The asker keeps it, not the host: a daemon that was killed may have been told what it never wrote down.
    """

    event: int = 0
    progress: int = 0
    persisted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PollReply:
    """What is new since the cursor that was asked with; ``cursor`` is the one to ask with next."""

    cursor: PollCursor
    events: tuple[RankEvent, ...] = ()
    progress: ProgressSnapshot | None = None
    persisted: PersisterStatus | None = None
    log_lost: str | None = None
