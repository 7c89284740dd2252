"""Nodes that accept no new ranks, and why, named to jobs that would otherwise fit there. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.core.facts.nodes import Closure, NodeClosed
from orchestrator.core.facts.requesters import ByNodeDrain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job

MOST_NAMED: Final = 16
"""Maximum number of nodes named to a job."""


def closed_nodes(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return the nodes that accept no new ranks, except for a reservation, which is reported as a reason of its own."""
    return tuple(node for node in nodes if not node.schedulable and closure_of(node, ()) is not None)


def closure_of(node: Node, jobs: Iterable[Job]) -> Closure | None:
    """Return why a node accepts no new ranks; None if it does. Some of ``jobs`` may be leaving it because it drains."""
    if not node.alive:
        return Closure.DOWN
    if not node.reachable:
        return Closure.UNREACHABLE
    if node.cordoned:
        return Closure.DRAINING if any(_drains(job, node.id) for job in jobs) else Closure.CORDONED
    return None if node.quarantined is None else Closure.QUARANTINED


def closed_for(closed: Iterable[Node], jobs: Iterable[Job], suits: Callable[[Node], bool]) -> tuple[NodeClosed, ...]:
    """Return the nodes that would suit a job if they accepted new ranks."""
    found: list[NodeClosed] = []
    for node in closed:
        state = closure_of(node, jobs)
        if state is not None and len(found) < MOST_NAMED and suits(node):
            found.append(NodeClosed(node=node.name, state=state))
    return tuple(found)


def _drains(job: Job, node_id: str) -> bool:
    return job.stop is not None and isinstance(job.stop.by, ByNodeDrain) and node_id in job.nodes
