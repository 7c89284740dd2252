"""Reservations of nodes for maintenance: gangs that may start before one, and gangs that stop when it begins. Pure.

While a reservation lasts, nothing runs on its node. Before it, a gang is placed there only if it is expected to end in
time, by its ``max_duration`` or by what is known of such jobs (durations.py). A job of which nothing is known is not
expected to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from orchestrator.core.facts.reasons import NodeReserved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.core.cluster import Node, NodeReservation
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.durations import RunTimes


class ReservedNodes(Mapping[str, "Node"]):
    """Nodes, some of them with reservations, as they are at a time; ``plain`` has them without their reservations.

    ``closed`` are those on which nothing runs now, with the reservation of each.
    """

    def __init__(self, nodes: Mapping[str, Node], at: float, run_times: RunTimes) -> None:
        self.plain = nodes
        self._at = at
        self._run_times = run_times
        self._reserved = {node_id: node.reservations for node_id, node in nodes.items() if node.reservations}
        begun = {i: [r for r in there if r.start <= at < r.end] for i, there in self._reserved.items()}
        self.closed: Mapping[str, NodeReservation] = {i: there[0] for i, there in begun.items() if there}
        self._nodes = {i: replace(n, reserved=self.closed[i]) if i in self.closed else n for i, n in nodes.items()}

    def __getitem__(self, node_id: str) -> Node:
        return self._nodes[node_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def closed_to(self, job: Job, at: float | None = None) -> frozenset[str]:
        """Return the nodes on which a job that starts at a time, by default now, would still run when they are reserved."""
        start = self._at if at is None else at
        left = self._run_times.left(job, start)
        end = inf if left is None else start + left.seconds
        return frozenset(
            node_id
            for node_id, reservations in self._reserved.items()
            if any(one.start < end and one.end > start for one in reservations)
        )

    def why(self, job: Job, node_ids: frozenset[str]) -> tuple[NodeReserved, ...]:
        """Return the reservations that keep a job from nodes, the first of each, in order of time."""
        left = self._run_times.left(job, self._at)
        found = []
        for node_id in node_ids:
            one = min((r for r in self._reserved[node_id] if r.end > self._at), key=lambda r: (r.start, r.id))
            found.append(
                NodeReserved(
                    node=self._nodes[node_id].name,
                    start=one.start,
                    end=one.end,
                    said=one.reason,
                    seconds=None if left is None else left.seconds,
                    begun=node_id in self.closed,
                )
            )
        return tuple(sorted(found, key=lambda fact: (fact.start, fact.node)))

    def ends(self) -> list[float]:
        """Return when the coming reservations of nodes that are not reserved now end, in order."""
        later = (r for i, reservations in self._reserved.items() if i not in self.closed for r in reservations)
        return sorted({one.end for one in later if one.end > self._at})

    def next_change(self) -> float | None:
        """Return when the next reservation begins or ends."""
        times = [at for known in self._reserved.values() for one in known for at in (one.start, one.end)]
        return min((at for at in times if at > self._at), default=None)


def nodes_at(nodes: Mapping[str, Node], at: float, run_times: RunTimes) -> Mapping[str, Node]:
    """Return the nodes as they are at a time; ``nodes`` itself if none has a reservation."""
    reserved = any(node.reservations for node in nodes.values())
    return ReservedNodes(nodes, at, run_times) if reserved else nodes


def plain(nodes: Mapping[str, Node]) -> Mapping[str, Node]:
    """Return the nodes without their reservations."""
    return nodes.plain if isinstance(nodes, ReservedNodes) else nodes


def closed_to(job: Job, nodes: Mapping[str, Node], at: float | None = None) -> frozenset[str]:
    """Return the nodes on which a job may not start at a time, by default now, because they will be reserved."""
    return nodes.closed_to(job, at) if isinstance(nodes, ReservedNodes) else frozenset()
