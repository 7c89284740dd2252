"""Requesters of a job's stop; reasons for a job's state, for its waiting, and for not retrying a failed one."""

from __future__ import annotations

from typing import ClassVar, Final

from orchestrator.core.codec import Integer, Number, Text, Time
from orchestrator.core.facts.fact import Fact, FactRecord, moment, quoted
from orchestrator.core.facts.faults import Closure, NodeClosed
from orchestrator.core.states import (
    EndCondition,
    FailureClass,
    JobState,
    StopPurpose,
)
from orchestrator.units import duration, number, plural


class ByUser(FactRecord, tag="by_user"):
    """A user's own command."""

    name: Text

    def sentence(self) -> str:
        return self.name


class ByForce(FactRecord, tag="by_force"):
    """The daemon's owner, who did not wait until the end of the ranks was confirmed."""

    name: Text

    def sentence(self) -> str:
        return f"{self.name} by force: nothing has confirmed that its ranks have ended"


class ByHold(FactRecord, tag="by_hold"):
    """A user holds a job that has not started: at its submission, or later."""

    name: Text

    def sentence(self) -> str:
        return self.name


class ByMatrix(FactRecord, tag="by_matrix"):
    """A job of the same matrix failed, and the matrix has ``fail_fast``."""

    matrix: Text
    job: Text

    def sentence(self) -> str:
        return f"fail_fast of {self.matrix}: {self.job} failed"


class ByPruner(FactRecord, tag="by_pruner"):
    """The trial did worse than the other trials of its search: ``metric`` was ``value`` at ``step``; None: not finite."""

    matrix: Text
    metric: Text
    step: Integer
    value: Number | None = None

    def sentence(self) -> str:
        value = "not finite" if self.value is None else f"{self.value:.6g}"
        return f"the pruner of {self.matrix}: {self.metric} was {value} at step {self.step}"


class ByGrowth(FactRecord, tag="by_growth"):
    """The elastic job can have ``ranks`` ranks; it has ``instead_of``."""

    ranks: Integer
    instead_of: Integer

    def sentence(self) -> str:
        return f"the scheduler, to run on {self.ranks} ranks instead of {self.instead_of}"


class ByShrinking(FactRecord, tag="by_shrinking"):
    """The elastic job continues on ``ranks`` ranks; it has ``instead_of``, and ``job`` waits for the rest."""

    job: Text
    ranks: Integer
    instead_of: Integer

    def sentence(self) -> str:
        return f"the scheduler, to run on {plural(self.ranks, 'rank')} instead of {self.instead_of}: {self.job} waits for the rest"


class ByPreemption(FactRecord, tag="by_preemption"):
    """The scheduler makes room for a job of higher priority."""

    job: Text
    priority: Integer

    def sentence(self) -> str:
        return f"for {self.job}, priority {self.priority}"


class ByTimeSharing(FactRecord, tag="by_time_sharing"):
    """The scheduler makes room for a job that is expected to need less time, or that has waited for too long."""

    job: Text
    overdue: bool = False

    def sentence(self) -> str:
        why = "has waited for too long" if self.overdue else "is expected to need less time"
        return f"for {self.job}, which {why}"


class ByIdleReclaim(FactRecord, tag="by_idle_reclaim"):
    """The job's GPUs have all been idle for longer than its limit of ``seconds``, and ``job`` waits for them."""

    job: Text
    seconds: Number

    def sentence(self) -> str:
        limit = duration(self.seconds)
        return f"for {self.job}: all GPUs of this job had been idle for {limit}"


class ByNodeDrain(FactRecord, tag="by_node_drain"):
    """A user drains a node of the gang."""

    name: Text

    def sentence(self) -> str:
        return f"{self.name} drains its node"


class ByNodeReservation(FactRecord, tag="by_node_reservation"):
    """A node of the gang is reserved until ``end``; ``said`` is a user's reason."""

    node: Text
    end: Time
    said: Text = ""

    def sentence(self) -> str:
        return f"node {self.node} is reserved until {moment(self.end)}{quoted(self.said)}"


class ByShutdown(FactRecord, tag="by_shutdown"):
    """The daemon stops, and jobs with it: ``orch down --stop-jobs``."""

    words: ClassVar[str] = "orch down --stop-jobs"


class ByLimit(FactRecord, tag="by_limit"):
    """The job has reached a limit of its job.yaml: ``key`` sets it."""

    key: Text

    def sentence(self) -> str:
        return f"its limit {self.key}"


_STOPS: Final = {
    StopPurpose.CANCEL: "cancelled by {by}",
    StopPurpose.PAUSE: "paused by {by}",
    StopPurpose.PREEMPT: "making room {by}",
    StopPurpose.TIMEOUT: "exceeded max_duration",
    StopPurpose.RESIZE: "stopped by {by}",
}

_ENDS: Final = {EndCondition.SUCCESS: "to succeed", EndCondition.FAILURE: "to fail", EndCondition.ANY: "to end"}


class Queued(FactRecord, tag="queued"):
    """It was submitted and not examined yet."""

    words: ClassVar[str] = "waiting to be placed"


class PlacingGang(FactRecord, tag="placing_gang"):
    """Its actors are being started."""

    words: ClassVar[str] = "placing the gang"


class StartingRanks(FactRecord, tag="starting_ranks"):
    """Its ranks are being started, with ``again`` in a gang that had ranks before."""

    again: bool = False

    def sentence(self) -> str:
        return "starting the ranks again" if self.again else "starting the ranks"


class RanksUp(FactRecord, tag="ranks_up"):
    """Every rank is up."""

    words: ClassVar[str] = "every rank is up"


class RanksSucceeded(FactRecord, tag="ranks_succeeded"):
    """Every rank ended with exit code 0; with ``releasing``, its GPUs are not yet released."""

    releasing: bool = False

    def sentence(self) -> str:
        return "every rank ended with 0; releasing the GPUs" if self.releasing else "every rank ended with exit code 0"


class CollectingFiles(FactRecord, tag="collecting_files"):
    """Its gang is released; its logs and outputs are copied home. ``cause`` is the reason for its end."""

    cause: Fact

    def sentence(self) -> str:
        return f"{self.cause.sentence()}; copying its logs and outputs, its GPUs are free"


class StopOrdered(FactRecord, tag="stop_ordered"):
    """Its ranks were asked to stop and have time to save; with ``at_once`` they have none."""

    purpose: StopPurpose
    by: Fact
    at_once: bool = False

    def sentence(self) -> str:
        by = _room(self.by) if self.purpose is StopPurpose.PREEMPT else self.by.sentence()
        time = "are killed" if self.at_once else "have time to save"
        return f"{_STOPS[self.purpose].format(by=by)}; its processes {time}"


class Cancelled(FactRecord, tag="cancelled"):
    """It was cancelled."""

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


class Paused(FactRecord, tag="paused"):
    """It was paused."""

    by: Fact

    def sentence(self) -> str:
        if isinstance(self.by, ByHold):
            return f"held by {self.by.name}; `orch release` puts it into the queue"
        return f"paused by {self.by.sentence()}"


class Resumed(FactRecord, tag="resumed"):
    """A user resumed it."""

    by: Text

    def sentence(self) -> str:
        return f"resumed by {self.by}"


class MadeRoom(FactRecord, tag="made_room"):
    """It was stopped so that others, or itself on more ranks, can be placed."""

    by: Fact

    def sentence(self) -> str:
        return f"stopped to make room {_room(self.by)}"


class PlacedAnew(FactRecord, tag="placed_anew"):
    """It waits for a new gang because of ``cause``; None where that is unknown."""

    cause: Fact | None = None

    def sentence(self) -> str:
        return f"to be placed again: {'lost its gang' if self.cause is None else self.cause.sentence()}"


class OthersAsked(FactRecord, tag="others_asked"):
    """Because of ``cause``, the ranks that still run are asked to stop as well."""

    cause: Fact

    def sentence(self) -> str:
        return f"{self.cause.sentence()}; the other ranks are asked to stop"


class NoRoom(FactRecord, tag="no_room"):
    """It was to continue at once, and ``ranks`` ranks do not fit any more; ``cause`` is why it had stopped."""

    ranks: Integer
    cause: Fact

    def sentence(self) -> str:
        return f"no room for {plural(self.ranks, 'rank')} any more: {self.cause.sentence()}"


class BackingOff(FactRecord, tag="backing_off"):
    """It is retried in ``seconds``, because of ``cause``."""

    seconds: Number
    cause: Fact

    def sentence(self) -> str:
        return f"tried again in {duration(self.seconds)} ({self.cause.sentence()})"


class DoesNotFit(FactRecord, tag="does_not_fit"):
    """Not even the empty nodes have the GPUs and CPUs that it needs."""

    gpus: Number
    cpus: Number

    def sentence(self) -> str:
        return f"does not fit on the nodes there are, even when they are empty: {_demand(self.gpus, self.cpus)}"


class AwaitsNodes(FactRecord, tag="awaits_nodes"):
    """It fits on no node that is up; with these nodes, which are down, it would."""

    nodes: tuple[Text, ...]
    gpus: Number
    cpus: Number

    def sentence(self) -> str:
        names, many = ", ".join(self.nodes), len(self.nodes) > 1
        there = f"node{'s' if many else ''} {names}, which {'are' if many else 'is'} down"
        return f"waiting for {there}; the nodes that are up cannot hold {_demand(self.gpus, self.cpus)}"


class NoNodeWithLabels(FactRecord, tag="no_node_with_labels"):
    """No node has all of the labels (``key=value``) that it requests."""

    labels: tuple[Text, ...]

    def sentence(self) -> str:
        one = len(self.labels) == 1
        none = f"no node has {'this label' if one else 'all of these labels'}; `orch nodes label` sets {'it' if one else 'them'}"
        return f"waiting for a node with {', '.join(self.labels)}: {none}"


class NodeReserved(FactRecord, tag="node_reserved"):
    """The node is reserved from ``start`` to ``end`` (a user's reason: ``said``), and a job would still run then: it is expected to need ``seconds``, None where that is unknown.

    ``begun``: the reservation has begun.
    """

    node: Text
    start: Time
    end: Time
    said: Text = ""
    seconds: Number | None = None
    begun: bool = False

    def sentence(self) -> str:
        if self.begun:
            return f"node {self.node} is reserved until {moment(self.end)}{quoted(self.said)}"
        need = (
            "it is not known how long the job runs (max_duration says it)"
            if self.seconds is None
            else f"the job is expected to run for {duration(self.seconds)}"
        )
        return f"node {self.node} is reserved from {moment(self.start)} to {moment(self.end)}{quoted(self.said)}, and {need}"


class NotEnoughFree(FactRecord, tag="not_enough_free"):
    """It waits until the GPUs and CPUs that it needs are free, on nodes with its ``labels`` (``key=value``) if it has some.

    ``reserved`` are reservations of nodes that exclude it, ``closed`` nodes that would suit it if new ranks were placed on them.
    """

    gpus: Number
    cpus: Number
    free_gpus: Number
    free_cpus: Number
    labels: tuple[Text, ...] = ()
    reserved: tuple[Fact, ...] = ()
    closed: tuple[Fact, ...] = ()

    def sentence(self) -> str:
        free = f"{plural(self.free_gpus, 'GPU')}, {plural(self.free_cpus, 'CPU')}"
        where = f" on nodes with {', '.join(self.labels)}" if self.labels else ""
        everywhere = " on all nodes" if self.labels else ""
        kept = "".join(f"; {each.sentence()}" for each in self.reserved)
        return f"waiting for {_demand(self.gpus, self.cpus)}{where}; free now{everywhere}: {free}{_closed(self.closed)}{kept}"


class QueueAtMaximum(FactRecord, tag="queue_at_maximum"):
    """Its queue, or one above it, would hold more than its maximum with the ``gpus`` that it needs."""

    queue: Text
    maximum: Integer
    used: Number
    gpus: Number

    def sentence(self) -> str:
        maximum = plural(self.maximum, "GPU")
        if self.used >= self.maximum:
            return f"queue {self.queue} is at its maximum of {maximum}"
        return f"queue {self.queue} holds {number(self.used)} of its maximum of {maximum}, and the job needs {number(self.gpus)}"


class UserAtLimit(FactRecord, tag="user_at_limit"):
    """Its user would have more than ``limit`` jobs run at once, or hold more than ``limit`` GPUs with the ``gpus`` that it needs."""

    user: Text
    limit: Integer
    used: Number
    gpus: Number

    def sentence(self) -> str:
        if not self.gpus:
            return f"user {self.user} has {plural(self.used, 'job')} running, the limit of a user is {self.limit}"
        return (
            f"user {self.user} holds {plural(self.used, 'GPU')}, the job needs {number(self.gpus)}, and the limit of a user is"
            f" {self.limit}"
        )


class AwaitsRoom(FactRecord, tag="awaits_room"):
    """Jobs of lower priority, or that borrow what is guaranteed to its queue, are stopping for it."""

    jobs: tuple[Text, ...]

    def sentence(self) -> str:
        return f"waiting until {', '.join(self.jobs)} {'has' if len(self.jobs) == 1 else 'have'} stopped to make room"


class AwaitsJob(FactRecord, tag="awaits_job"):
    """It waits until another job, which is in ``state``, ends as ``on`` requires; and ``more`` others."""

    job: Text
    on: EndCondition
    state: JobState
    more: Integer = 0

    def sentence(self) -> str:
        more = f", and for {plural(self.more, 'other job')}" if self.more else ""
        return f"waiting for {self.job} ({self.state}) {_ENDS[self.on]}{more}"


class AwaitsTime(FactRecord, tag="awaits_time"):
    """It is not to start before this wall time."""

    start_at: Time

    def sentence(self) -> str:
        return f"starts at {moment(self.start_at)}"


class MatrixAtLimit(FactRecord, tag="matrix_at_limit"):
    """The maximum number of jobs of its matrix run, or precede it."""

    matrix: Text
    limit: Integer

    def sentence(self) -> str:
        return f"{self.matrix} runs at most {plural(self.limit, 'job')} at a time (matrix.max_concurrent)"


class PrerequisiteUnmet(FactRecord, tag="prerequisite_unmet"):
    """A job that it depends on has ended in ``state``, which does not meet ``on``."""

    job: Text
    on: EndCondition
    state: JobState

    def sentence(self) -> str:
        return f"depends on {self.job} {_ENDS[self.on]}, which ended {self.state}"


class PrerequisiteGone(FactRecord, tag="prerequisite_gone"):
    """A job that it depends on has no record any more."""

    job: Text
    on: EndCondition

    def sentence(self) -> str:
        return f"depends on {self.job} {_ENDS[self.on]}, whose record was removed"


class LogPolicyFails(FactRecord, tag="log_policy_fails"):
    """A log policy of the job makes this end final."""

    words: ClassVar[str] = "a log policy requires it to fail"


class BudgetSpent(FactRecord, tag="budget_spent"):
    """All restarts of the failure's class are used."""

    failure_class: FailureClass
    used: Integer
    budget: Integer

    def sentence(self) -> str:
        return f"{self.used} of {self.budget} {self.failure_class} restarts used"


class NoNewCheckpoint(FactRecord, tag="no_new_checkpoint"):
    """Several restarts in a row produced no newer checkpoint."""

    restarts: Integer

    def sentence(self) -> str:
        return f"{plural(self.restarts, 'restart')} in a row brought no newer checkpoint (retry.max_no_progress)"


class NotRetried(FactRecord, tag="not_retried"):
    """It failed for ``cause`` and is not retried because of ``refusal``."""

    cause: Fact
    refusal: Fact

    def sentence(self) -> str:
        return f"{self.cause.sentence()}; not tried again: {self.refusal.sentence()}"


def _room(by: Fact) -> str:
    """Return the job for which, or the cause for which, a job makes room."""
    for_a_job = isinstance(by, ByPreemption | ByTimeSharing | ByIdleReclaim)
    return by.sentence() if for_a_job else f"({by.sentence()})"


A_LITTLE_OF_A_CPU: Final = 0.01


def _demand(gpus: float, cpus: float) -> str:
    # Ray reserves a thousandth of a CPU for each rank with ``cpu: 0``.
    some = plural(cpus, "CPU") if cpus >= A_LITTLE_OF_A_CPU or not cpus else "a CPU that is not fully reserved (cpu: 0)"
    return " and ".join([*([plural(gpus, "GPU")] if gpus else []), some])


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
