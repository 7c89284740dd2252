"""What a rank's supervisor reports: numbered events, and the newest of what is not an event. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.core.events import Exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.checkpoint.repository.persister import PersisterStatus
    from orchestrator.core.diagnosis.observation import ProcessSeen
    from orchestrator.train.script.progress_facts import ProgressSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent:
    """One thing that happened to the rank: ``started``, ``exited`` or ``gone``. Times are seconds since the epoch."""

    number: int
    kind: str
    at: float
    pid: int = 0
    cold: str | None = None
    exit: Exit | None = None
    """How it ended, of ``exited``."""

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Take what was pickled, also by an actor of an earlier version: its fields of an end lay here."""
        own, end = state[: len(_OWN)], state[len(_OWN) :]
        told = end[0] if len(end) == 1 else None
        if len(end) > 1:
            fields_of_an_end = dict(zip(_OF_AN_END, end, strict=False))
            told = Exit(rank=0, at=own[2], **fields_of_an_end) if own[1] == "exited" else None
        for name, value in (*zip(_OWN, own, strict=True), ("exit", told)):
            object.__setattr__(self, name, value)


_OWN = ("number", "kind", "at", "pid", "cold")
_OF_AN_END = (
    *(
        "exit_code",
        "signal",
        "error_type",
        "error_message",
        "error_at",
        "log_tail",
        "evidence",
        "policy",
        "policy_note",
    ),
    *("missing_file", "stop_seen_at", "stop_scope", "last_step", "total_steps", "memory"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PollCursor:
    """What an asker has been told: the number of the last event, and of the last progress, persister status and look at its processes.

    The asker keeps it, not the host: a daemon that was killed may have been told what it never wrote down.
    """

    event: int = 0
    progress: int = 0
    persisted: int = 0
    processes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PollReply:
    """What is new since the cursor that was asked with; ``cursor`` is the one to ask with next."""

    cursor: PollCursor
    events: tuple[RankEvent, ...] = ()
    progress: ProgressSnapshot | None = None
    persisted: PersisterStatus | None = None
    log_lost: str | None = None
    processes: ProcessSeen | None = None
