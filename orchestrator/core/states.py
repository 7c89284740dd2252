"""The states of jobs and attempts, and the one table of legal transitions.

This file alone determines which state may follow which. A transition that the table lacks is an error that carries the
job's recent events. Whether a state is terminal, or holds GPUs, is a property of the state, not an ``if`` elsewhere.
The diagram in docs/architecture.md is generated from the table.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from orchestrator.core.errors import CoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class JobState(StrEnum):
    """The state of a job. Everything else is a reason."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    DRAINING = "DRAINING"
    SUSPENDED = "SUSPENDED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        """Whether no event may change the state any more."""
        return not TRANSITIONS[self]

    @property
    def may_hold_gang(self) -> bool:
        """Whether actors and GPUs may be held in this state."""
        return self in _HOLDING


class AttemptState(StrEnum):
    """The state of one attempt of a job."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    DRAINING = "DRAINING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    PREEMPTED = "PREEMPTED"
    LOST = "LOST"
    ABORTED = "ABORTED"


class FailureClass(StrEnum):
    """Class of reasons why an attempt ended; each has its own restart budget."""

    USER = "user"
    INFRA = "infra"
    HANG = "hang"
    PREEMPTION = "preemption"
    TIMEOUT = "timeout"
    SPEC = "spec"


class EndCondition(StrEnum):
    """The end of a job that its dependents require. A cancelled job has neither succeeded nor failed."""

    SUCCESS = "success"
    FAILURE = "failure"
    ANY = "any"

    def met_by(self, state: JobState) -> bool:
        """Whether a job that ended in ``state`` meets the condition."""
        if self is EndCondition.ANY:
            return state.is_terminal
        return state is (JobState.SUCCEEDED if self is EndCondition.SUCCESS else JobState.FAILED)


class EndOrder(StrEnum):
    """The order to its keeper that preceded the end of a rank's process."""

    STOP = "stop"
    STOP_DEADLINE = "stop_deadline"
    """Its time to stop was over."""
    KILL = "kill"
    LIFELINE = "lifeline"
    """Its actor had ended."""


class StopScope(StrEnum):
    """The processes that a request to stop reached."""

    RANK = "rank"
    """The rank's own process, as far as is known."""
    MACHINE = "machine"
    """Its keeper as well, which only a request to all processes of the node reaches."""


class OutOf(StrEnum):
    """The memory that ran out when the kernel killed a process for it: the rank's limit, or the whole machine's."""

    LIMIT = "limit"
    MACHINE = "machine"


class StopPurpose(StrEnum):
    """Reason why a job is drained; determines the next state. Weakest first: a later one overrides an earlier one."""

    RESIZE = "resize"
    PREEMPT = "preempt"
    PAUSE = "pause"
    TIMEOUT = "timeout"
    CANCEL = "cancel"

    def overrides(self, other: StopPurpose) -> bool:
        """Whether a job that drains for ``other`` now drains for this."""
        order = list(StopPurpose)
        return order.index(self) > order.index(other)

    @property
    def returns(self) -> bool:
        """Whether the job continues at once, on another number of ranks, without a wait in the queue."""
        return self is StopPurpose.RESIZE


_S = JobState
TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    _S.PENDING: frozenset({_S.STARTING, _S.SUSPENDED, _S.CANCELLED, _S.FAILED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.RECOVERING, _S.DRAINING, _S.FAILED}),
    _S.RUNNING: frozenset({_S.SUCCEEDED, _S.FAILED, _S.RECOVERING, _S.DRAINING}),
    _S.RECOVERING: frozenset({_S.STARTING, _S.PENDING, _S.DRAINING, _S.FAILED}),
    _S.DRAINING: frozenset(
        {_S.PENDING, _S.SUSPENDED, _S.STARTING, _S.RECOVERING, _S.CANCELLED, _S.FAILED, _S.SUCCEEDED}
    ),
    _S.SUSPENDED: frozenset({_S.PENDING, _S.CANCELLED}),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}
_HOLDING = frozenset({_S.STARTING, _S.RUNNING, _S.RECOVERING, _S.DRAINING})

TRANSITION_LABELS: Mapping[tuple[JobState, JobState], str] = {
    (_S.PENDING, _S.STARTING): "placed",
    (_S.PENDING, _S.SUSPENDED): "pause",
    (_S.PENDING, _S.CANCELLED): "cancel",
    (_S.PENDING, _S.FAILED): "dependency failed",
    (_S.STARTING, _S.RUNNING): "every rank is up",
    (_S.RUNNING, _S.SUCCEEDED): "every rank ended with 0",
    (_S.RECOVERING, _S.STARTING): "processes forked again",
    (_S.RECOVERING, _S.PENDING): "gang lost: placed anew",
    (_S.RECOVERING, _S.FAILED): "budget spent",
    (_S.DRAINING, _S.PENDING): "preempted",
    (_S.DRAINING, _S.SUSPENDED): "paused",
    (_S.DRAINING, _S.STARTING): "resized",
    (_S.DRAINING, _S.CANCELLED): "cancelled",
    (_S.DRAINING, _S.FAILED): "timed out",
    (_S.DRAINING, _S.SUCCEEDED): "ended by itself",
    (_S.SUSPENDED, _S.PENDING): "resume",
    (_S.SUSPENDED, _S.CANCELLED): "cancel",
}


class IllegalTransitionError(CoreError):
    """A transition that the table of this module lacks; the job's recent events follow."""

    def __init__(self, current: JobState, target: JobState, story: tuple[str, ...]) -> None:
        self.current, self.target, self.story = current, target, story
        super().__init__(
            f"{current} -> {target} is not a transition; events before it: {' | '.join(story) or 'nothing'}"
        )


def check_transition(current: JobState, target: JobState, story: Sequence[str]) -> None:
    """Raise IllegalTransitionError, with the job's recent events (``story``), unless the table has ``current -> target``."""
    if target not in TRANSITIONS[current]:
        raise IllegalTransitionError(current, target, tuple(story))


def mermaid() -> str:
    """Return the transition table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", "    [*] --> PENDING"]
    for source, targets in TRANSITIONS.items():
        for target in sorted(targets):
            label = TRANSITION_LABELS.get((source, target))
            lines.append(f"    {source} --> {target}" + (f": {label}" if label else ""))
    lines.extend(f"    {state} --> [*]" for state in JobState if state.is_terminal)
    return "\n".join(lines)
