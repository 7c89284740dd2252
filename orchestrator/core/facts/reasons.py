"""Reasons for a job's state, for its waiting, and for not retrying a failed one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.requesters import ByPruner
from orchestrator.core.states import (  # noqa: TC001  # conformance.py reads them when it runs
    EndCondition,
    FailureClass,
    JobState,
    StopPurpose,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued(Fact):
    """It was submitted and not examined yet."""

    kind: ClassVar[str] = "queued"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingGang(Fact):
    """Its actors are being started."""

    kind: ClassVar[str] = "placing_gang"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingRanks(Fact):
    """Its ranks are being started, with ``again`` in a gang that had ranks before."""

    kind: ClassVar[str] = "starting_ranks"
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksUp(Fact):
    """Every rank is up."""

    kind: ClassVar[str] = "ranks_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSucceeded(Fact):
    """Every rank ended with exit code 0; with ``releasing``, its GPUs are not yet released."""

    kind: ClassVar[str] = "ranks_succeeded"
    releasing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectingFiles(Fact):
    """Its gang is released; its logs and outputs are copied home. ``cause`` is the reason for its end."""

    kind: ClassVar[str] = "collecting_files"
    cause: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrdered(Fact):
    """Its ranks were asked to stop and have time to save; with ``at_once`` they have none."""

    kind: ClassVar[str] = "stop_ordered"
    purpose: StopPurpose
    by: Fact
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(Fact):
    """It was cancelled."""

    kind: ClassVar[str] = "cancelled"
    by: Fact


def is_pruned(reason: Fact) -> bool:
    """Whether a job was ended because it did worse than the other trials of its search: no failure, and no success."""
    return isinstance(reason, Cancelled) and isinstance(reason.by, ByPruner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(Fact):
    """It was paused."""

    kind: ClassVar[str] = "paused"
    by: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Fact):
    """A user resumed it."""

    kind: ClassVar[str] = "resumed"
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeRoom(Fact):
    """It was stopped so that others, or itself on more ranks, can be placed."""

    kind: ClassVar[str] = "made_room"
    by: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedAnew(Fact):
    """It waits for a new gang because of ``cause``; None where that is unknown."""

    kind: ClassVar[str] = "placed_anew"
    cause: Fact | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OthersAsked(Fact):
    """Because of ``cause``, the ranks that still run are asked to stop as well."""

    kind: ClassVar[str] = "others_asked"
    cause: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom(Fact):
    """It was to continue at once, and ``ranks`` ranks do not fit any more; ``cause`` is why it had stopped."""

    kind: ClassVar[str] = "no_room"
    ranks: int
    cause: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class BackingOff(Fact):
    """It is retried in ``seconds``, because of ``cause``."""

    kind: ClassVar[str] = "backing_off"
    seconds: float
    cause: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class DoesNotFit(Fact):
    """Not even the empty nodes have the GPUs and CPUs that it needs."""

    kind: ClassVar[str] = "does_not_fit"
    gpus: float
    cpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitsNodes(Fact):
    """It fits on no node that is up; with these nodes, which are down, it would."""

    kind: ClassVar[str] = "awaits_nodes"
    nodes: tuple[str, ...]
    gpus: float
    cpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoNodeWithLabels(Fact):
    """No node has all of the labels (``key=value``) that it requests."""

    kind: ClassVar[str] = "no_node_with_labels"
    labels: tuple[str, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAtMaximum(Fact):
    """Its queue, or one above it, would hold more than its maximum with the ``gpus`` that it needs."""

    kind: ClassVar[str] = "queue_at_maximum"
    queue: str
    maximum: int
    used: float
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UserAtLimit(Fact):
    """Its user would have more than ``limit`` jobs run at once, or hold more than ``limit`` GPUs with the ``gpus`` that it needs."""

    kind: ClassVar[str] = "user_at_limit"
    user: str
    limit: int
    used: float
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitsRoom(Fact):
    """Jobs of lower priority, or that borrow what is guaranteed to its queue, are stopping for it."""

    kind: ClassVar[str] = "awaits_room"
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitsJob(Fact):
    """It waits until another job, which is in ``state``, ends as ``on`` requires; and ``more`` others."""

    kind: ClassVar[str] = "awaits_job"
    job: str
    on: EndCondition
    state: JobState
    more: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitsTime(Fact):
    """It is not to start before this wall time."""

    kind: ClassVar[str] = "awaits_time"
    start_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixAtLimit(Fact):
    """The maximum number of jobs of its matrix run, or precede it."""

    kind: ClassVar[str] = "matrix_at_limit"
    matrix: str
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrerequisiteUnmet(Fact):
    """A job that it depends on has ended in ``state``, which does not meet ``on``."""

    kind: ClassVar[str] = "prerequisite_unmet"
    job: str
    on: EndCondition
    state: JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class PrerequisiteGone(Fact):
    """A job that it depends on has no record any more."""

    kind: ClassVar[str] = "prerequisite_gone"
    job: str
    on: EndCondition


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPolicyFails(Fact):
    """A log policy of the job makes this end final."""

    kind: ClassVar[str] = "log_policy_fails"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpent(Fact):
    """All restarts of the failure's class are used."""

    kind: ClassVar[str] = "budget_spent"
    failure_class: FailureClass
    used: int
    budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoNewCheckpoint(Fact):
    """Several restarts in a row produced no newer checkpoint."""

    kind: ClassVar[str] = "no_new_checkpoint"
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRetried(Fact):
    """It failed for ``cause`` and is not retried because of ``refusal``."""

    kind: ClassVar[str] = "not_retried"
    cause: Fact
    refusal: Fact
