"""Answers queries about nodes and their GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.core.scheduler.durations import RunTimes
from orchestrator.core.scheduler.reservations import nodes_at
from orchestrator.daemon.gpus.conditions import known_conditions
from orchestrator.daemon.nodes.views import node_view

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from orchestrator.api import views as v
    from orchestrator.core.facts.fact import Fact
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.nodes.quarantine import NodeQuarantine
    from orchestrator.gpu.balance.view import GpuRow
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.exporters.exporters import Exporters


class NodeQueries:
    """Queries about nodes. ``blind`` returns those of some nodes that do not see a directory of this machine.

    ``rows`` returns every GPU; its argument is reasons of quarantine by UUID.
    """

    def __init__(
        self,
        nodes: NodeRegistry,
        loop: Loop,
        quarantine: NodeQuarantine,
        exporters: Exporters,
        *,
        blind: Callable[[str, Collection[str]], Awaitable[list[str]]],
        rows: Callable[[Mapping[str, Fact], float], Awaitable[Sequence[GpuRow]]],
    ) -> None:
        self._exporters = exporters
        self._nodes = nodes
        self._loop = loop
        self._quarantine = quarantine
        self._blind = blind
        self._rows = rows

    async def views(self) -> Sequence[v.NodeView]:
        """Return every node, by name."""
        conditions = known_conditions(self._nodes, self._exporters, self._quarantine.quarantined_gpus, driver=True)
        views = [
            node_view(
                node,
                self._nodes.reports.get(node.id),
                self._loop.jobs.begun.values(),
                lost=self._nodes.lost_gpus.get(node.id, ()),
                conditions=conditions,
            )
            for node in nodes_at(self._loop.nodes, self._loop.now(), RunTimes()).values()
        ]
        return sorted(views, key=lambda n: (n.name, n.id))

    async def gpus(self, max_age_seconds: float = 0.0) -> Sequence[dict[str, Any]]:
        """Return every GPU of every node, with its holders and with values at most that old."""
        return [row.to_json() for row in await self._rows(self._quarantine.quarantined_gpus, max_age_seconds)]

    def simulated_gpus(self) -> int:
        """Return how many of the cluster's GPUs are simulated."""
        reports = self._nodes.reports.values()
        return sum(len(r.gpus) for r in reports if any(g.simulated for g in r.gpus))

    async def blind_to(self, directory: str) -> list[str]:
        """Return names of nodes that share neither the home nor this directory. Raises OSError: this machine cannot write it."""
        reports = self._nodes.reports
        apart = [node_id for node_id, report in reports.items() if not report.home_shared]
        blind = await self._blind(directory, apart) if apart else []
        return [f"{reports[node_id].hostname} ({node_id[:12]})" for node_id in blind]
