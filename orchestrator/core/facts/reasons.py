"""Reasons for a job's state, for its waiting, and for not retrying a failed one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.nodes import Closure, NodeClosed
from orchestrator.core.facts.requesters import ByHold, ByIdleReclaim, ByPreemption, ByPruner, ByTimeSharing
from orchestrator.core.facts.words import moment, quoted, span
from orchestrator.core.states import (  # conformance.py reads them when it runs
    EndCondition,
    FailureClass,
    JobState,
    StopPurpose,
)
from orchestrator.units import plural

_STOPS: Final = {
    StopPurpose.CANCEL: "cancelled by {by}",
    StopPurpose.PAUSE: "paused by {by}",
    StopPurpose.PREEMPT: "making room {by}",
    StopPurpose.TIMEOUT: "exceeded max_duration",
    StopPurpose.RESIZE: "stopped by {by}",
}

_ENDS: Final = {EndCondition.SUCCESS: "to succeed", EndCondition.FAILURE: "to fail", EndCondition.ANY: "to end"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued(Fact):
    """It was submitted and not examined yet."""

    kind: ClassVar[str] = "queued"

    def sentence(self) -> str:
        return "waiting to be placed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingGang(Fact):
    """Its actors are being started."""

    kind: ClassVar[str] = "placing_gang"

    def sentence(self) -> str:
        return "placing the gang"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingRanks(Fact):
    """Its ranks are being started, with ``again`` in a gang that had ranks before."""

    kind: ClassVar[str] = "starting_ranks"
    again: bool = False

    def sentence(self) -> str:
        return "starting the ranks again" if self.again else "starting the ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksUp(Fact):
    """Every rank is up."""

    kind: ClassVar[str] = "ranks_up"

    def sentence(self) -> str:
        return "every rank is up"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSucceeded(Fact):
    """Every rank ended with exit code 0; with ``releasing``, its GPUs are not yet released."""

    kind: ClassVar[str] = "ranks_succeeded"
    releasing: bool = False

    def sentence(self) -> str:
        return "every rank ended with 0; releasing the GPUs" if self.releasing else "every rank ended with exit code 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrdered(Fact):
    """Its ranks were asked to stop and have time to save."""

    kind: ClassVar[str] = "stop_ordered"
    purpose: StopPurpose
    by: Fact

    def sentence(self) -> str:
        by = _room(self.by) if self.purpose is StopPurpose.PREEMPT else self.by.sentence()
        return f"{_STOPS[self.purpose].format(by=by)}; its processes have time to save"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(Fact):
    """It was cancelled."""

    kind: ClassVar[str] = "cancelled"
    by: Fact

    def sentence(self) -> str:
        if isinstance(self.by, ByPruner):
            value = (
                "not finite" if self.by.value is None else f"{self.by.value:.6g}, worse than the median of the trials"
            )
            return f"pruned at step {self.by.step}: {self.by.metric} was {value}"
        return f"cancelled by {self.by.sentence()}"


def is_pruned(reason: Fact) -> bool:
    """Whether a job was ended because it did worse than the other trials of its search: no failure, and no success."""
    return isinstance(reason, Cancelled) and isinstance(reason.by, ByPruner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(Fact):
    """It was paused."""

    kind: ClassVar[str] = "paused"
    by: Fact

    def sentence(self) -> str:
        if isinstance(self.by, ByHold):
            return f"held by {self.by.name}; `orch release` puts it into the queue"
        return f"paused by {self.by.sentence()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Fact):
    """A user resumed it."""

    kind: ClassVar[str] = "resumed"
    by: str

    def sentence(self) -> str:
        return f"resumed by {self.by}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeRoom(Fact):
    """It was stopped so that others, or itself on more ranks, can be placed."""

    kind: ClassVar[str] = "made_room"
    by: Fact

    def sentence(self) -> str:
        return f"stopped to make room {_room(self.by)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedAnew(Fact):
    """It waits for a new gang because of ``cause``; None where that is unknown."""

    kind: ClassVar[str] = "placed_anew"
    cause: Fact | None = None

    def sentence(self) -> str:
        return f"to be placed again: {'lost its gang' if self.cause is None else self.cause.sentence()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OthersAsked(Fact):
    """Because of ``cause``, the ranks that still run are asked to stop as well."""

    kind: ClassVar[str] = "others_asked"
    cause: Fact

    def sentence(self) -> str:
        return f"{self.cause.sentence()}; the other ranks are asked to stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom(Fact):
    """It was to continue at once, and ``ranks`` ranks do not fit any more; ``cause`` is why it had stopped."""

    kind: ClassVar[str] = "no_room"
    ranks: int
    cause: Fact

    def sentence(self) -> str:
        return f"no room for {plural(self.ranks, 'rank')} any more: {self.cause.sentence()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackingOff(Fact):
    """It is retried in ``seconds``, because of ``cause``."""

    kind: ClassVar[str] = "backing_off"
    seconds: float
    cause: Fact

    def sentence(self) -> str:
        return f"tried again in {self.seconds:.0f} s ({self.cause.sentence()})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoesNotFit(Fact):
    """Not even the empty nodes have the GPUs and CPUs that it needs."""

    kind: ClassVar[str] = "does_not_fit"
    gpus: float
    cpus: float

    def sentence(self) -> str:
        return f"does not fit on the nodes there are, even when they are empty: {_demand(self.gpus, self.cpus)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitsNodes(Fact):
    """It fits on no node that is up; with these nodes, which are down, it would."""

    kind: ClassVar[str] = "awaits_nodes"
    nodes: tuple[str, ...]
    gpus: float
    cpus: float

    def sentence(self) -> str:
        names, many = ", ".join(self.nodes), len(self.nodes) > 1
        there = f"node{'s' if many else ''} {names}, which {'are' if many else 'is'} down"
        return f"waiting for {there}; the nodes that are up cannot hold {_demand(self.gpus, self.cpus)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoNodeWithLabels(Fact):
    """No node has all of the labels (``key=value``) that it requests."""

    kind: ClassVar[str] = "no_node_with_labels"
    labels: tuple[str, ...]

    def sentence(self) -> str:
        one = len(self.labels) == 1
        none = f"no node has {'this label' if one else 'all of these labels'}; `orch nodes label` sets {'it' if one else 'them'}"
        return f"waiting for a node with {', '.join(self.labels)}: {none}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReserved(Fact):
    """The node is reserved from ``start`` to ``end`` (a user's reason: ``said``), and a job would still run then: it is expected to need ``seconds``, None where that is unknown.

    ``begun``: the reservation has begun.
    """

    kind: ClassVar[str] = "node_reserved"
    node: str
    start: float
    end: float
    said: str = ""
    seconds: float | None = None
    begun: bool = False

    def sentence(self) -> str:
        if self.begun:
            return f"node {self.node} is reserved until {moment(self.end)}{quoted(self.said)}"
        need = (
            "it is not known how long the job runs (max_duration says it)"
            if self.seconds is None
            else f"the job is expected to run for {span(self.seconds)}"
        )
        return f"node {self.node} is reserved from {moment(self.start)} to {moment(self.end)}{quoted(self.said)}, and {need}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotEnoughFree(Fact):
    """It waits until the GPUs and CPUs that it needs are free, on nodes with its ``labels`` (``key=value``) if it has some.

    ``reserved`` are reservations of nodes that exclude it, ``closed`` nodes that would suit it if new ranks were placed on them.
    """

    kind: ClassVar[str] = "not_enough_free"
    gpus: float
    cpus: float
    free_gpus: float
    free_cpus: float
    labels: tuple[str, ...] = ()
    reserved: tuple[Fact, ...] = ()
    closed: tuple[Fact, ...] = ()

    def sentence(self) -> str:
        free = f"{plural(self.free_gpus, 'GPU')}, {plural(self.free_cpus, 'CPU')}"
        where = f" on nodes with {', '.join(self.labels)}" if self.labels else ""
        everywhere = " on all nodes" if self.labels else ""
        kept = "".join(f"; {each.sentence()}" for each in self.reserved)
        return f"waiting for {_demand(self.gpus, self.cpus)}{where}; free now{everywhere}: {free}{_closed(self.closed)}{kept}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAtMaximum(Fact):
    """Its queue, or one above it, would hold more than its maximum with the ``gpus`` that it needs."""

    kind: ClassVar[str] = "queue_at_maximum"
    queue: str
    maximum: int
    used: float
    gpus: float

    def sentence(self) -> str:
        maximum = plural(self.maximum, "GPU")
        if self.used >= self.maximum:
            return f"queue {self.queue} is at its maximum of {maximum}"
        return f"queue {self.queue} holds {self.used:g} of its maximum of {maximum}, and the job needs {self.gpus:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserAtLimit(Fact):
    """Its user would have more than ``limit`` jobs run at once, or hold more than ``limit`` GPUs with the ``gpus`` that it needs."""

    kind: ClassVar[str] = "user_at_limit"
    user: str
    limit: int
    used: float
    gpus: float

    def sentence(self) -> str:
        if not self.gpus:
            return f"user {self.user} has {plural(self.used, 'job')} running, the limit of a user is {self.limit}"
        return (
            f"user {self.user} holds {plural(self.used, 'GPU')}, the job needs {self.gpus:g}, and the limit of a user is"
            f" {self.limit}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitsRoom(Fact):
    """Jobs of lower priority, or that borrow what is guaranteed to its queue, are stopping for it."""

    kind: ClassVar[str] = "awaits_room"
    jobs: tuple[str, ...]

    def sentence(self) -> str:
        return f"waiting until {', '.join(self.jobs)} {'has' if len(self.jobs) == 1 else 'have'} stopped to make room"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitsJob(Fact):
    """It waits until another job, which is in ``state``, ends as ``on`` requires; and ``more`` others."""

    kind: ClassVar[str] = "awaits_job"
    job: str
    on: EndCondition
    state: JobState
    more: int = 0

    def sentence(self) -> str:
        more = f", and for {plural(self.more, 'other job')}" if self.more else ""
        return f"waiting for {self.job} ({self.state}) {_ENDS[self.on]}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitsTime(Fact):
    """It is not to start before this wall time."""

    kind: ClassVar[str] = "awaits_time"
    start_at: float

    def sentence(self) -> str:
        return f"starts at {moment(self.start_at)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixAtLimit(Fact):
    """The maximum number of jobs of its matrix run, or precede it."""

    kind: ClassVar[str] = "matrix_at_limit"
    matrix: str
    limit: int

    def sentence(self) -> str:
        return f"{self.matrix} runs at most {plural(self.limit, 'job')} at a time (matrix.max_concurrent)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrerequisiteUnmet(Fact):
    """A job that it depends on has ended in ``state``, which does not meet ``on``."""

    kind: ClassVar[str] = "prerequisite_unmet"
    job: str
    on: EndCondition
    state: JobState

    def sentence(self) -> str:
        return f"depends on {self.job} {_ENDS[self.on]}, which ended {self.state}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrerequisiteGone(Fact):
    """A job that it depends on has no record any more."""

    kind: ClassVar[str] = "prerequisite_gone"
    job: str
    on: EndCondition

    def sentence(self) -> str:
        return f"depends on {self.job} {_ENDS[self.on]}, whose record was removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPolicyFails(Fact):
    """A log policy of the job makes this end final."""

    kind: ClassVar[str] = "log_policy_fails"

    def sentence(self) -> str:
        return "a log policy requires it to fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpent(Fact):
    """All restarts of the failure's class are used."""

    kind: ClassVar[str] = "budget_spent"
    failure_class: FailureClass
    used: int
    budget: int

    def sentence(self) -> str:
        return f"{self.used} of {self.budget} {self.failure_class} restarts used"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoNewCheckpoint(Fact):
    """Several restarts in a row produced no newer checkpoint."""

    kind: ClassVar[str] = "no_new_checkpoint"
    restarts: int

    def sentence(self) -> str:
        return f"{plural(self.restarts, 'restart')} in a row brought no newer checkpoint (retry.max_no_progress)"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRetried(Fact):
    """It failed for ``cause`` and is not retried because of ``refusal``."""

    kind: ClassVar[str] = "not_retried"
    cause: Fact
    refusal: Fact

    def sentence(self) -> str:
        return f"{self.cause.sentence()}; not tried again: {self.refusal.sentence()}"


def _room(by: Fact) -> str:
    """Return the job for which, or the cause for which, a job makes room."""
    for_a_job = isinstance(by, ByPreemption | ByTimeSharing | ByIdleReclaim)
    return by.sentence() if for_a_job else f"({by.sentence()})"


def _demand(gpus: float, cpus: float) -> str:
    return " and ".join([*([plural(gpus, "GPU")] if gpus else []), plural(cpus, "CPU")])


def _closed(nodes: tuple[Fact, ...]) -> str:
    """Return the clauses about nodes that would suit if they took new ranks, one for each state."""
    by_state: dict[Closure, list[str]] = {}
    for each in nodes:
        if isinstance(each, NodeClosed):
            by_state.setdefault(each.state, []).append(each.node)
    return "".join(
        f"; {'node' if len(names) == 1 else 'nodes'} {', '.join(names)} {'is' if len(names) == 1 else 'are'} {state.value}"
        for state, names in by_state.items()
    )
