"""The phases of a job. Each holds what exists in it alone, so that no other combination can be represented.

A waiting job has no gang; a stop exists only while a job drains; a job restarts in its gang only while no part of the
gang is lost; only a failed job ends with a failure. ``Job.phase`` is one of these values, and the job's state is the
phase's.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from orchestrator.core import events as ev
from orchestrator.core.codec import Integer, Record, Text, Time
from orchestrator.core.job.attempt import Exits, Stop
from orchestrator.core.states import AttemptState, JobState

if TYPE_CHECKING:
    from orchestrator.core.events import Exit


class _Actors(Record, tag_field="kind"):
    """``nodes`` has an entry for each rank; ``seats`` are known when every actor has answered.

    ``pids`` are those of the attempt's processes by rank, empty until all are up, and None when no process is left.
    ``degraded``: a node does not answer.
    """

    nodes: tuple[Text, ...]
    seats: tuple[ev.Seat, ...] = ()
    pids: tuple[Integer, ...] | None = ()
    degraded: bool = False


class Gang(_Actors):
    """The actors and GPUs that a job holds."""


class LostGang(_Actors):
    """A gang that has lost an actor or a node: no attempt starts in it again."""


class Hold(StrEnum):
    """The state of the gang that a job holds."""

    NOTHING = "nothing"
    PROCESSES = "processes"
    """A whole gang, with processes of the current attempt that may still exist."""
    ACTORS = "actors"
    """A whole gang without processes."""
    LOST = "lost gang"
    """A gang with a lost part."""
    FILES = "files"
    """No gang; logs and outputs of the released one are not yet collected."""


def hold_of(phase: Phase) -> Hold:
    """Return what a job in this phase holds."""
    gang = phase.gang if isinstance(phase, Holding) else None
    if gang is None:
        return Hold.FILES if isinstance(phase, Holding) and phase.files_on else Hold.NOTHING
    if isinstance(gang, LostGang):
        return Hold.LOST
    return Hold.ACTORS if gang.pids is None else Hold.PROCESSES


class Pending(Record, tag_field="phase"):
    """The job waits for a gang. ``failure``, here and below, is that of the last failed attempt."""

    state: ClassVar[JobState] = JobState.PENDING
    not_before: Time = 0.0
    failure: ev.Failure | None = None


class Suspended(Record, tag_field="phase"):
    """The job is paused: it holds nothing, and waits for a resume."""

    state: ClassVar[JobState] = JobState.SUSPENDED
    failure: ev.Failure | None = None


NO_EXITS = Exits()


class Holding(Record, tag_field="phase"):
    """Common part of the current attempt's phases: its gang, None once released, and how its ranks ended so far.

    ``files_on``: the nodes of a released gang, one for each rank, until its files are collected. Nothing follows before that.
    ``attempt_states`` are the possible states of the current attempt in the phase.
    """

    attempt_states: ClassVar[frozenset[AttemptState]] = frozenset(AttemptState)
    gang: Gang | LostGang | None
    files_on: tuple[str, ...] = ()
    exits: Exits = NO_EXITS
    failure: ev.Failure | None = None

    @property
    def left_early(self) -> tuple[Exit, ...]:
        """Return the ranks that ended, in any way, after a request to stop that orch had not sent, before their last step.

        A rank that reports no steps has reached its last one when another has.
        """
        finished = any(e.finished for e in self.exits)
        return tuple(e for e in self.exits if self._asked_from_outside(e) and not e.completed(others=finished))

    def ended_well(self, ranks: int) -> bool:
        """Whether each of ``ranks`` ranks ended with 0, and none because of a request."""
        return len(self.exits) == ranks and all(e.ok for e in self.exits) and not self.left_early

    def _asked_from_outside(self, ended: Exit) -> bool:
        return ended.stop_seen_at is not None


class Starting(Holding):
    """The gang is placed, and its ranks are launched."""

    state: ClassVar[JobState] = JobState.STARTING
    attempt_states: ClassVar[frozenset[AttemptState]] = frozenset({AttemptState.STARTING})


class Running(Holding):
    """Every rank is up."""

    state: ClassVar[JobState] = JobState.RUNNING
    attempt_states: ClassVar[frozenset[AttemptState]] = frozenset({AttemptState.RUNNING})


class Leaving(Holding):
    """Ranks have left after a request to stop that orch had not sent; the others have until ``deadline`` to follow."""

    state: ClassVar[JobState] = JobState.RUNNING
    attempt_states: ClassVar[frozenset[AttemptState]] = frozenset({AttemptState.RUNNING})
    deadline: Time


class Finishing(Holding):
    """Every rank ended with 0; the gang must be released. Raises ValueError for a gang with processes."""

    state: ClassVar[JobState] = JobState.RUNNING
    attempt_states: ClassVar[frozenset[AttemptState]] = frozenset({AttemptState.SUCCEEDED})

    def __post_init__(self) -> None:
        if self.gang is not None and self.gang.pids is not None:
            raise ValueError("a job whose ranks all ended with 0 has no processes")


_FAILED_ATTEMPT = frozenset({AttemptState.FAILED, AttemptState.PREEMPTED, AttemptState.LOST})


class Restarting(Holding):
    """The attempt failed; the next one starts in the same gang, once the processes have ended, not before ``not_before``."""

    state: ClassVar[JobState] = JobState.RECOVERING
    attempt_states: ClassVar[frozenset[AttemptState]] = _FAILED_ATTEMPT
    gang: Gang
    failure: ev.Failure
    not_before: Time


class Replacing(Holding):
    """The attempt failed; once its gang is released the job is placed again, not before ``not_before``."""

    state: ClassVar[JobState] = JobState.RECOVERING
    attempt_states: ClassVar[frozenset[AttemptState]] = _FAILED_ATTEMPT
    failure: ev.Failure
    not_before: Time


class GivingUp(Holding):
    """The attempt failed and is not retried; once its gang is released the job has failed."""

    state: ClassVar[JobState] = JobState.RECOVERING
    attempt_states: ClassVar[frozenset[AttemptState]] = _FAILED_ATTEMPT
    failure: ev.Failure


class Draining(Holding):
    """Ranks have time to save; the stop's purpose determines what follows the gang's release."""

    state: ClassVar[JobState] = JobState.DRAINING
    stop: Stop

    def _asked_from_outside(self, ended: Exit) -> bool:
        return ended.stop_seen_at is not None and ended.ordered is None


class Succeeded(Record, tag_field="phase"):
    """Every rank ended with exit code 0."""

    state: ClassVar[JobState] = JobState.SUCCEEDED
    exit_code: ClassVar[int] = 0
    failure: ClassVar[None] = None


class Failed(Record, tag_field="phase"):
    """The end of a job that is not retried, or that never had an attempt and so may have no failure of one."""

    state: ClassVar[JobState] = JobState.FAILED
    exit_code: Integer | None
    failure: ev.Failure | None


class Cancelled(Record, tag_field="phase"):
    """The job ended at a user's request."""

    state: ClassVar[JobState] = JobState.CANCELLED
    exit_code: ClassVar[None] = None
    failure: ClassVar[None] = None


Recovering: TypeAlias = Restarting | Replacing | GivingUp
HoldingPhase: TypeAlias = Starting | Running | Leaving | Finishing | Recovering | Draining
Ended: TypeAlias = Succeeded | Failed | Cancelled
Phase: TypeAlias = Pending | Suspended | HoldingPhase | Ended

ENDED: tuple[type[Succeeded], type[Failed], type[Cancelled]] = (Succeeded, Failed, Cancelled)
