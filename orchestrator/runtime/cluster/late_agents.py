"""Ends node agents that do not answer, because they are stopped or all their threads hang; Ray then starts new ones.

Ray notices that a process ended, not that it hangs. The evidence is the answers to the cluster's regular rounds.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from orchestrator.runtime.deadline import within
from orchestrator.runtime.nodes.ray_nodes import end_worker

if TYPE_CHECKING:
    from collections.abc import Callable

LATE_SECONDS: Final = 20.0
"""How long an agent may leave all calls unanswered before it is ended."""

_ANSWER_SECONDS: Final = 5.0


class Agents(Protocol):
    """The agents of nodes, and the nodes that do not answer."""

    agents: dict[str, Any]
    silent: dict[str, str]


class Calls(Protocol):
    """Runs blocking calls of Ray."""

    async def call(self, function: Callable[..., Any], *args: Any, restart: bool) -> Any:
        """Return what the function returns; raise what it raises, and TimeoutError."""
        ...


class LateAgents:
    """Tracks, by node, since when the agent has not answered."""

    def __init__(self, nodes: Agents, ray: Calls) -> None:
        self._nodes = nodes
        self._ray = ray
        self._since: dict[str, float] = {}

    def answered(self, node_id: str) -> None:
        """Record an answer of the node's agent."""
        self._since.pop(node_id, None)

    async def late(self, node_id: str) -> None:
        """Record a missing answer; end the agent after LATE_SECONDS without one, if its node answers.

        A report may wait for a driver that hangs, so a cheaper call is made first.
        """
        since = self._since.setdefault(node_id, time.monotonic())
        nodes = self._nodes
        if time.monotonic() - since < LATE_SECONDS or node_id in nodes.silent or node_id not in nodes.agents:
            return
        agent = nodes.agents[node_id]
        self.answered(node_id)
        with contextlib.suppress(Exception):  # the agent has died meanwhile: Ray starts another
            try:
                await within(_ANSWER_SECONDS, agent.reads.remote("/", ""))
            except TimeoutError:
                await self._ray.call(end_worker, agent, restart=True)
