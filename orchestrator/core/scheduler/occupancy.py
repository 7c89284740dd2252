"""Resources that gangs hold, by node and by account, updated with each change. Pure.

``free_on`` and ``Shares.of`` compute the same from scratch; here a change updates only the nodes and the account that
it concerns.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core.scheduler.placement import free_on, take
from orchestrator.core.scheduler.room.closed import closed_nodes
from orchestrator.core.scheduler.room.holding import Holding, places_of
from orchestrator.core.scheduler.room.topology import topology_of
from orchestrator.core.scheduler.room.vacancy import Vacancy
from orchestrator.core.scheduler.use import (
    MOST_HALVINGS,
    Account,
    Amounts,
    account_of,
    amounts_of,
    capacity_of,
    gang_began,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job


@dataclass(slots=True)
class HeldUse:
    """Gangs of an account: how many there are, and what they hold.

    ``begun`` is what they hold, each gang weighted by 2**((began - s) / half-life).
    """

    gangs: int = 0
    held: Amounts = field(default_factory=Amounts)
    begun: Amounts = field(default_factory=Amounts)


class Accounts:
    """Resources that the gangs of each queue and user hold. ``since`` is the s of ``HeldUse``."""

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
    """The jobs that hold gangs, the resources that they leave free, and what their accounts hold."""

    def __init__(self) -> None:
        self.holding = Holding()
        self._on: dict[str, dict[JobId, None]] = {}
        self._nodes: Mapping[str, Node] = {}
        self._capacity: tuple[Mapping[str, Node], Amounts] | None = None
        self._closed: tuple[Mapping[str, Node], Sequence[Node]] | None = None
        self._free = Vacancy()
        self._loose = Vacancy()
        self._changed: set[str] = set()
        self._accounts: Accounts | None = None

    @property
    def jobs(self) -> Mapping[JobId, Job]:
        """Return the jobs that hold gangs."""
        return self.holding.by_id

    def put(self, job: Job) -> None:
        """Set a job's record."""
        before = self.jobs.get(job.id)
        if before is not None:
            if before.held is job.held and before.attempts is job.attempts:
                self.holding.put(job)
                return
            self.drop(job.id)
        if not job.gang_open:
            return
        self.holding.put(job)
        for node_id in job.nodes:
            self._on.setdefault(node_id, {})[job.id] = None
        self._changed.update(job.nodes)
        if self._accounts is not None:
            self._accounts.count(job, 1)

    def drop(self, job_id: JobId) -> None:
        """Remove a job."""
        job = self.holding.drop(job_id)
        if job is None:
            return
        for node_id in set(job.nodes):
            del self._on[node_id][job_id]
        self._changed.update(job.nodes)
        if self._accounts is not None:
            self._accounts.count(job, -1)

    @contextmanager
    def free(self, nodes: Mapping[str, Node]) -> Iterator[tuple[Vacancy, Vacancy]]:
        """Yield two copies of every schedulable node's free resources, and undo the round's changes at its end.

        While a job leaves its nodes, the resources that it moves to are not free.
        """
        if nodes is not self._nodes:
            self._changed |= {
                i for i, node in nodes.items() if (known := self._nodes.get(i)) is not node and known != node
            }
            for gone in self._free.keys() - nodes.keys():
                self._free.drop(gone)
                self._loose.drop(gone)
            self._nodes = nodes
            self._free.topology = self._loose.topology = topology_of(nodes.values())
        changed = self._changed & nodes.keys()
        there = {job_id for node_id in changed for job_id in self._on.get(node_id, ())}
        # All at once, so that a gang of many nodes is examined once.
        free = free_on((nodes[node_id] for node_id in changed), (self.jobs[job_id] for job_id in there))
        for node_id in changed:
            if (left := free.get(node_id)) is None:
                self._free.drop(node_id)
                self._loose.drop(node_id)
            else:
                self._free.put(node_id, left)
                self._loose.put(node_id, left.copy())
        self._changed.clear()
        both = self._free, self._loose
        for vacancy in both:
            vacancy.begin()
            self._keep_places(vacancy)
        try:
            yield both
        finally:
            for vacancy in both:
                vacancy.restore()

    def _keep_places(self, free: Vacancy) -> None:
        for job in self.holding.moving.values():
            where = places_of(job)
            if all(node_id in free for node_id in where):
                take(job, where, free)

    def capacity(self, nodes: Mapping[str, Node]) -> Amounts:
        """Return the resources of the nodes, added up once while the nodes stay the same."""
        if self._capacity is None or self._capacity[0] is not nodes:
            self._capacity = nodes, capacity_of(nodes)
        return self._capacity[1]

    def closed(self, nodes: Mapping[str, Node]) -> Sequence[Node]:
        """Return the nodes that accept no new ranks, found once while the nodes stay the same."""
        if self._closed is None or self._closed[0] is not nodes:
            self._closed = nodes, closed_nodes(nodes.values())
        return self._closed[1]

    def accounts(self, half_life: float, now: float) -> Accounts:
        """Return what each account holds."""
        known = self._accounts
        usable = known is not None and known.half_life == half_life
        if known is None or not (usable and 0.0 <= now - known.since <= MOST_HALVINGS * half_life):
            known = self._accounts = Accounts(half_life, now)
            for job in self.jobs.values():
                known.count(job, 1)
        return known
