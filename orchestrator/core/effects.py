"""What a job's record wants done to the world. Every effect is idempotent, so a restarted daemon orders it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.core.ids import JobId


@dataclass(frozen=True, slots=True)
class Ensure:
    """The attempt's gang exists, its ranks have been launched once, and they are watched."""

    job_id: JobId
    attempt: int
    gang: int


@dataclass(frozen=True, slots=True)
class StopRanks:
    """SIGTERM to every rank; SIGKILL of whole trees at ``deadline`` (wall time); keep watching."""

    job_id: JobId
    attempt: int
    gang: int
    deadline: float


@dataclass(frozen=True, slots=True)
class KillRanks:
    """Every process of the attempt is killed now, and confirmed gone."""

    job_id: JobId
    attempt: int
    gang: int


@dataclass(frozen=True, slots=True)
class ReleaseGang:
    """Actors and placement group are removed, and confirmed gone."""

    job_id: JobId
    gang: int


Effect = Ensure | StopRanks | KillRanks | ReleaseGang
