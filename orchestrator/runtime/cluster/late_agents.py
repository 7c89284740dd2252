"""Node agents that do not answer: one that is stopped, or whose threads all hang, is ended, and made anew by Ray.

Ray sees that a process ended, not that it stands still. Decides by the answers that the cluster's rounds get anyway.
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
"""How long an agent may owe every answer before it is ended."""

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
    """By node: since when its agent has owed an answer."""

    def __init__(self, nodes: Agents, ray: Calls) -> None:
        self._nodes = nodes
        self._ray = ray
        self._since: dict[str, float] = {}

    def answered(self, node_id: str) -> None:
        """The agent of the node is well."""
        self._since.pop(node_id, None)

    async def late(self, node_id: str) -> None:
        """The agent did not answer in time; it is ended when it has not for LATE_SECONDS, and its node answers.

        A report may wait for a driver that hangs, so the agent is asked for less before that.
        """
        since = self._since.setdefault(node_id, time.monotonic())
        nodes = self._nodes
        if time.monotonic() - since < LATE_SECONDS or node_id in nodes.silent or node_id not in nodes.agents:
            return
        agent = nodes.agents[node_id]
        self.answered(node_id)
        with contextlib.suppress(Exception):  # whatever Ray says of an agent that has died meanwhile: it makes another
            try:
                await within(_ANSWER_SECONDS, agent.reads.remote("/", ""))
            except TimeoutError:
                await self._ray.call(end_worker, agent, restart=True)
