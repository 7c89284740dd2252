"""What gangs hold, by node and by account, updated with each change. Pure.

``free_on`` and ``Shares.of`` compute the same from scratch; here a change costs what it touches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from orchestrator.core.scheduler.placement import free_on
from orchestrator.core.scheduler.use import Account, Amounts, account_of, amounts_of, gang_began

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.cluster import Free, Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job

_MOST_HALVINGS: Final = 100.0


@dataclass(slots=True)
class HeldUse:
    """What an account's gangs hold: how many, how much, and the same with each weighed by 2**((began - s) / half-life)."""

    gangs: int = 0
    held: Amounts = field(default_factory=Amounts)
    begun: Amounts = field(default_factory=Amounts)


class Accounts:
    """What the gangs of each queue and user hold. ``since`` is s of ``HeldUse``."""

    def __init__(self, half_life: float, since: float) -> None:
        self.half_life = half_life
        self.since = since
        self.held: dict[Account, HeldUse] = {}

    def count(self, job: Job, sign: int) -> None:
        """Add (1) or subtract (-1) the gang of a record."""
        account = account_of(job)
        use = self.held.setdefault(account, HeldUse())
        use.gangs += sign
        if not use.gangs:
            del self.held[account]
            return
        amounts, began = amounts_of(job, len(job.nodes)), gang_began(job)
        weight = 2.0 ** (((self.since if began is None else began) - self.since) / self.half_life)
        use.held = use.held.plus(amounts, sign)
        use.begun = use.begun.plus(amounts, sign * weight)


class Occupancy:
    """The jobs that hold gangs, what is free beside them, and what their accounts hold."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, Job] = {}
        self._on: dict[str, dict[JobId, Job]] = {}
        self._nodes: Mapping[str, Node] = {}
        self._free: dict[str, Free] = {}
        self._changed: set[str] = set()
        self._accounts: Accounts | None = None

    def put(self, job: Job) -> None:
        """Set a job's record."""
        before = self.jobs.get(job.id)
        if before is not None:
            if before.held is job.held and before.attempts is job.attempts:
                self.jobs[job.id] = job
                for node_id in job.nodes:
                    self._on[node_id][job.id] = job
                return
            self.drop(job.id)
        if not job.gang_open:
            return
        self.jobs[job.id] = job
        for node_id in job.nodes:
            self._on.setdefault(node_id, {})[job.id] = job
        self._changed.update(job.nodes)
        if self._accounts is not None:
            self._accounts.count(job, 1)

    def drop(self, job_id: JobId) -> None:
        """Remove a job."""
        job = self.jobs.pop(job_id, None)
        if job is None:
            return
        for node_id in set(job.nodes):
            del self._on[node_id][job_id]
        self._changed.update(job.nodes)
        if self._accounts is not None:
            self._accounts.count(job, -1)

    def free(self, nodes: Mapping[str, Node]) -> dict[str, Free]:
        """Return the free resources of every schedulable node, as a copy for a round."""
        if nodes is not self._nodes:
            self._changed |= {i for i, node in nodes.items() if self._nodes.get(i) != node}
            for gone in self._free.keys() - nodes.keys():
                del self._free[gone]
            self._nodes = nodes
        for node_id in self._changed & nodes.keys():
            self._free.pop(node_id, None)
            self._free |= free_on((nodes[node_id],), self._on.get(node_id, {}).values())
        self._changed.clear()
        if self._free.keys() == nodes.keys():
            return {node_id: self._free[node_id].copy() for node_id in nodes}
        return {node_id: self._free[node_id].copy() for node_id in nodes if node_id in self._free}

    def accounts(self, half_life: float, now: float) -> Accounts:
        """Return what each account holds."""
        known = self._accounts
        if known is None or known.half_life != half_life or now - known.since > _MOST_HALVINGS * half_life:
            known = self._accounts = Accounts(half_life, now)
            for job in self.jobs.values():
                known.count(job, 1)
        return known
