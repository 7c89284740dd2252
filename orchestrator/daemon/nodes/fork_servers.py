"""Starts the fork servers of nodes before their first job."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from orchestrator.core.cluster import Node

FORK_SERVER_SECONDS: Final = 60.0


class ForkServers:
    """Starts a fork server of the daemon's interpreter on each node with CPUs, once per node and agent.

    ``agents`` returns the node agents by node, ``nodes`` the nodes that the loop has.
    """

    def __init__(self, agents: Callable[[], Mapping[str, Any]], nodes: Callable[[], Collection[Node]]) -> None:
        self._agents = agents
        self._nodes = nodes
        self._warm: set[str] = set()

    async def warm(self) -> None:
        """Start missing ones; after a failure the first job on the node starts it."""
        agents = self._agents()
        # A head without CPUs never gets a rank.
        takes_ranks = {node.id for node in self._nodes() if node.cpus > 0}
        cold = (agents.keys() & takes_ranks) - self._warm
        self._warm = (self._warm & agents.keys()) | cold
        await asyncio.gather(*(self._start(agents[node_id]) for node_id in cold))

    async def _start(self, agent: Any) -> None:
        with contextlib.suppress(Exception):  # the agent has ended
            async with asyncio.timeout(FORK_SERVER_SECONDS):
                await agent.fork_server.remote(sys.executable)
