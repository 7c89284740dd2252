"""Shrinks elastic jobs so that a waiting job fits. Nothing is preempted if that is enough. Pure.

An elastic job got its ranks beyond its ``min`` from resources that no job needed. So it gives them back to a job of its
queue that is of no lower priority, or for which it would be preempted anyway: at a checkpoint, and not more often than
it grows (elastic.py). It gives as few ranks as are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.facts.requesters import ByShrinking
from orchestrator.core.scheduler.elastic import may_shrink
from orchestrator.core.scheduler.placement import free_on, give_back, known_shares, place, share_unknown, take
from orchestrator.core.scheduler.preemption import ends_anyway
from orchestrator.core.scheduler.room.topology import topology_of
from orchestrator.core.scheduler.room.vacancy import Vacancy
from orchestrator.core.scheduler.service.saves import loss

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.reclaim import Reclaim
    from orchestrator.core.scheduler.room.holding import Holding


def shrinking_for(job: Job, holding: Holding) -> tuple[Job, ...]:
    """Return the jobs that are shrinking for this one."""
    stops = ((other, other.stop.by) for other in holding.elastic.values() if other.stop is not None)
    return tuple(other for other, by in stops if isinstance(by, ByShrinking) and by.job == job.id)


def shrink(
    job: Job, holding: Holding, nodes: Mapping[str, Node], now: float, rule: Reclaim
) -> tuple[tuple[Job, int], ...]:
    """Return the jobs that shrink for one that does not fit, with their remaining ranks; nothing if that fails."""
    able = [other for other in holding.elastic.values() if may_shrink(other, now) and rule.shrinks(other)]
    if not able:
        return ()
    staying = [other for other in holding if not ends_anyway(other)]
    if any(map(share_unknown, staying)):
        return ()
    free = Vacancy(free_on(nodes.values(), staying), topology_of(nodes.values()))
    there = [other for other in able if all(node in free for node in other.nodes)]
    if place(job, free, nodes) is not None:
        return ()
    return _fewest(job, sorted(there, key=lambda other: loss(other, now)), free, nodes)


def _fewest(job: Job, able: Sequence[Job], free: Vacancy, nodes: Mapping[str, Node]) -> tuple[tuple[Job, int], ...]:
    """Return the jobs that shrink. They are placed before the job, as in the round after their stop."""
    chosen: list[tuple[Job, int]] = []
    for other in able:
        give_back(other, other.nodes, known_shares(other), free)
        for ranks in range(other.num_workers - 1, other.size.least - 1, -1):
            where = place(other, free, nodes, ranks=ranks)
            if where is None:
                continue
            shares = take(other, where, free)
            if place(job, free, nodes) is not None:
                return (*chosen, (other, ranks))
            if ranks > other.size.least:
                give_back(other, where, shares, free)
        chosen.append((other, other.size.least))
    return ()
