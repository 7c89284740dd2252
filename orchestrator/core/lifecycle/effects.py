"""The effect that a job's record requires of the runtime: one table, by the job's phase and what it holds.

Every effect is idempotent, and follows from the record alone: a restarted daemon derives and orders it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from orchestrator.core.job import phases as p
from orchestrator.core.job.phases import Hold, hold_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job


@dataclass(frozen=True, slots=True)
class Ensure:
    """The attempt's gang exists, its ranks have been launched once, and they are watched."""

    job_id: JobId
    attempt: int
    gang: int


@dataclass(frozen=True, slots=True)
class StopRanks:
    """Every rank gets SIGTERM, and whole process trees SIGKILL at ``deadline`` (wall time); the ranks stay watched."""

    job_id: JobId
    attempt: int
    gang: int
    deadline: float


@dataclass(frozen=True, slots=True)
class KillRanks:
    """Every process of the attempt is killed now, and confirmed to have ended."""

    job_id: JobId
    attempt: int
    gang: int


@dataclass(frozen=True, slots=True)
class ReleaseGang:
    """Actors and placement group are removed or no longer serve the job, and no process of the gang is left."""

    job_id: JobId
    gang: int


@dataclass(frozen=True, slots=True)
class CollectFiles:
    """Logs and outputs of a released gang are in the home, or are given up."""

    job_id: JobId
    gang: int


Effect: TypeAlias = Ensure | StopRanks | KillRanks | ReleaseGang | CollectFiles
_Kind: TypeAlias = type[Ensure] | type[StopRanks] | type[KillRanks] | type[ReleaseGang] | type[CollectFiles]

_NOTHING: Mapping[Hold, _Kind | None] = {Hold.NOTHING: None}
_LIVE: Mapping[Hold, _Kind | None] = {
    Hold.NOTHING: None,
    Hold.PROCESSES: Ensure,
    Hold.ACTORS: Ensure,
    Hold.LOST: None,  # the attempt's failure follows
}
_ENDING: Mapping[Hold, _Kind | None] = {
    Hold.NOTHING: None,
    Hold.PROCESSES: KillRanks,
    Hold.ACTORS: ReleaseGang,
    Hold.LOST: ReleaseGang,
    Hold.FILES: CollectFiles,
}

EFFECTS: Mapping[type[p.Phase], Mapping[Hold, _Kind | None]] = {
    p.Pending: _NOTHING,
    p.Starting: _LIVE,
    p.Running: _LIVE,
    p.Leaving: {**_LIVE, Hold.PROCESSES: StopRanks},
    p.Finishing: {kind: effect for kind, effect in _ENDING.items() if kind is not Hold.PROCESSES},
    p.Restarting: {Hold.PROCESSES: KillRanks, Hold.ACTORS: None},
    p.Replacing: _ENDING,
    p.GivingUp: _ENDING,
    p.Draining: {**_ENDING, Hold.PROCESSES: StopRanks},
    p.Suspended: _NOTHING,
    p.Succeeded: _NOTHING,
    p.Failed: _NOTHING,
    p.Cancelled: _NOTHING,
}
"""The effect of each phase, by what the job holds. A missing entry is impossible: no value of the phase holds it."""


def desired_effect(job: Job) -> Effect | None:
    """Return the effect that the record requires, whatever was done before."""
    kind = EFFECTS[type(job.phase)][hold_of(job.phase)]
    if kind is None:
        return None
    if kind is ReleaseGang or kind is CollectFiles:
        return kind(job.id, job.gang)
    if kind is StopRanks and isinstance(job.phase, p.Draining | p.Leaving):
        deadline = job.phase.deadline if isinstance(job.phase, p.Leaving) else job.phase.stop.deadline
        return StopRanks(job.id, job.attempt_number, job.gang, deadline)
    return (Ensure if kind is Ensure else KillRanks)(job.id, job.attempt_number, job.gang)


def table() -> str:
    """Return the table in Markdown, for the documentation."""
    names: dict[_Kind | None, str] = {
        None: "-",
        Ensure: "ensure",
        StopRanks: "stop ranks",
        KillRanks: "kill ranks",
        ReleaseGang: "release gang",
        CollectFiles: "collect files",
    }
    lines = ["| state | phase | " + " | ".join(Hold) + " |", "|---|---|" + "---|" * len(Hold)]
    for phase, row in EFFECTS.items():
        cells = [names[row[hold]] if hold in row else "" for hold in Hold]
        lines.append(f"| {phase.state} | {phase.__name__} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
