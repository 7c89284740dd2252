"""Requesters of a job's stop."""

from __future__ import annotations

from orchestrator.core.codec import Integer, Number, Text, Time
from orchestrator.core.facts.fact import FactRecord
from orchestrator.core.facts.words import moment, quoted, span
from orchestrator.units import plural


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
        limit = span(self.seconds)
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

    def sentence(self) -> str:
        return "orch down --stop-jobs"


class ByLimit(FactRecord, tag="by_limit"):
    """The job has reached a limit of its job.yaml: ``key`` sets it."""

    key: Text

    def sentence(self) -> str:
        return f"its limit {self.key}"
