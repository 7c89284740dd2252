"""Requesters of a job's stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.words import moment, quoted, span
from orchestrator.units import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class ByUser(Fact):
    """A user's own command."""

    kind: ClassVar[str] = "by_user"
    name: str

    def sentence(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ByForce(Fact):
    """The daemon's owner, who did not wait until the end of the ranks was confirmed."""

    kind: ClassVar[str] = "by_force"
    name: str

    def sentence(self) -> str:
        return f"{self.name} by force: nothing has confirmed that its ranks have ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHold(Fact):
    """A user holds a job that has not started: at its submission, or later."""

    kind: ClassVar[str] = "by_hold"
    name: str

    def sentence(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ByMatrix(Fact):
    """A job of the same matrix failed, and the matrix has ``fail_fast``."""

    kind: ClassVar[str] = "by_matrix"
    matrix: str
    job: str

    def sentence(self) -> str:
        return f"fail_fast of {self.matrix}: {self.job} failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByPruner(Fact):
    """The trial did worse than the other trials of its search: ``metric`` was ``value`` at ``step``; None: not finite."""

    kind: ClassVar[str] = "by_pruner"
    matrix: str
    metric: str
    step: int
    value: float | None = None

    def sentence(self) -> str:
        value = "not finite" if self.value is None else f"{self.value:.6g}"
        return f"the pruner of {self.matrix}: {self.metric} was {value} at step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByGrowth(Fact):
    """The elastic job can have ``ranks`` ranks; it has ``instead_of``."""

    kind: ClassVar[str] = "by_growth"
    ranks: int
    instead_of: int

    def sentence(self) -> str:
        return f"the scheduler, to run on {self.ranks} ranks instead of {self.instead_of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByShrinking(Fact):
    """The elastic job continues on ``ranks`` ranks; it has ``instead_of``, and ``job`` waits for the rest."""

    kind: ClassVar[str] = "by_shrinking"
    job: str
    ranks: int
    instead_of: int

    def sentence(self) -> str:
        return f"the scheduler, to run on {plural(self.ranks, 'rank')} instead of {self.instead_of}: {self.job} waits for the rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByPreemption(Fact):
    """The scheduler makes room for a job of higher priority."""

    kind: ClassVar[str] = "by_preemption"
    job: str
    priority: int

    def sentence(self) -> str:
        return f"for {self.job}, priority {self.priority}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByTimeSharing(Fact):
    """The scheduler makes room for a job that is expected to need less time, or that has waited for too long."""

    kind: ClassVar[str] = "by_time_sharing"
    job: str
    overdue: bool = False

    def sentence(self) -> str:
        why = "has waited for too long" if self.overdue else "is expected to need less time"
        return f"for {self.job}, which {why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByIdleReclaim(Fact):
    """The job's GPUs have all been idle for longer than its limit of ``seconds``, and ``job`` waits for them."""

    kind: ClassVar[str] = "by_idle_reclaim"
    job: str
    seconds: float

    def sentence(self) -> str:
        limit = span(self.seconds)
        return f"for {self.job}: all GPUs of this job had been idle for {limit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByNodeDrain(Fact):
    """A user drains a node of the gang."""

    kind: ClassVar[str] = "by_node_drain"
    name: str

    def sentence(self) -> str:
        return f"{self.name} drains its node"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByNodeReservation(Fact):
    """A node of the gang is reserved until ``end``; ``said`` is a user's reason."""

    kind: ClassVar[str] = "by_node_reservation"
    node: str
    end: float
    said: str = ""

    def sentence(self) -> str:
        return f"node {self.node} is reserved until {moment(self.end)}{quoted(self.said)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByShutdown(Fact):
    """The daemon stops, and jobs with it: ``orch down --stop-jobs``."""

    kind: ClassVar[str] = "by_shutdown"

    def sentence(self) -> str:
        return "orch down --stop-jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByLimit(Fact):
    """The job has reached a limit of its job.yaml: ``key`` sets it."""

    kind: ClassVar[str] = "by_limit"
    key: str

    def sentence(self) -> str:
        return f"its limit {self.key}"
