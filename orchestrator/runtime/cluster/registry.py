"""The nodes that have an agent: added when new, queried in each round, dropped when Ray declares them dead."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from orchestrator.runtime.cluster.connection import CALL_SECONDS
from orchestrator.runtime.cluster.gpu_reservations import still_there
from orchestrator.runtime.cluster.late_agents import LateAgents
from orchestrator.runtime.deadline import within
from orchestrator.runtime.nodes.ray_nodes import answers
from orchestrator.runtime.ranks.rank_events import FENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.runtime.cluster.agents import AgentMaker
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.nodes.agent import NodeGpu, NodeReport
    from orchestrator.runtime.nodes.control_plane import RayNode

MEET_SECONDS: Final = 10.0  # how long a round waits for new nodes' agents; slower ones are added in a later round
AGAIN_SECONDS: Final = 5.0  # a driver that hangs must not delay reports of other nodes


class NodeRegistry:
    """Records of nodes by id: ``agents``, their newest ``reports``, and ``lost_gpus``, lost since the node was added.

    ``silent`` gives the reason for each node that does not answer though Ray counts it as alive. ``answered`` has the
    nodes that reported in the last round.
    """

    def __init__(self, ray: RayConnection, maker: AgentMaker) -> None:
        self._ray = ray
        self._maker = maker
        self._late_agents = LateAgents(self, ray)
        self._meetings: dict[str, asyncio.Task[None]] = {}
        self._first_gpus: dict[str, tuple[NodeGpu, ...]] = {}
        self._dead_since: dict[str, float] = {}
        self.agents: dict[str, Any] = {}
        self.reports: dict[str, NodeReport] = {}
        self.lost_gpus: dict[str, tuple[NodeGpu, ...]] = {}
        self.silent: dict[str, str] = {}
        self.answered: set[str] = set()

    async def update(self, raw: Mapping[str, RayNode]) -> None:
        """Run one round. Raises the error of an embedded head's only node.

        On an existing cluster an agent that does not answer delays no other node.
        """
        alive = {node_id for node_id, node in raw.items() if node.alive}
        self._drop_dead(set(raw) - alive)
        self.answered.clear()
        known = set(self.reports)
        await self._first_reports(alive)
        await asyncio.gather(*(self._ask_again(node_id) for node_id in known & alive))

    def _drop_dead(self, dead: set[str]) -> None:
        for node_id in dead:
            self._dead_since.setdefault(node_id, time.monotonic())
        for node_id in (set(self.agents) | set(self._meetings)) & dead:
            self.agents.pop(node_id, None)
            self.reports.pop(node_id, None)
            self.lost_gpus.pop(node_id, None)
            if node_id in self._meetings:
                self._meetings.pop(node_id).cancel()

    async def _first_reports(self, alive: set[str]) -> None:
        """Get the first report of every new node."""
        for node_id in alive - set(self.reports) - set(self._meetings):
            self._meetings[node_id] = asyncio.create_task(self._first_report(node_id), name=f"meet-{node_id[:8]}")
        if not self._meetings:
            return
        limit = CALL_SECONDS * 2 if self._maker.embedded else MEET_SECONDS
        done, _ = await asyncio.wait(self._meetings.values(), timeout=limit)
        for node_id in [n for n, task in self._meetings.items() if task in done]:
            error = self._meetings.pop(node_id).exception()
            if error is not None and self._maker.embedded:
                raise error

    async def _first_report(self, node_id: str) -> None:
        try:
            self.agents[node_id] = await self._ray.call(self._maker.make, node_id)
            self.reports[node_id] = await within(CALL_SECONDS, self.agents[node_id].report.remote())
            self.answered.add(node_id)
            self._first_gpus[node_id] = self.reports[node_id].gpus
            self.lost_gpus.pop(node_id, None)
        except BaseException:
            self.agents.pop(node_id, None)
            raise

    async def _ask_again(self, node_id: str) -> None:
        """Get the node's newest report. A node that does not answer keeps its last one: Ray decides liveness."""
        try:
            report = await within(AGAIN_SECONDS, self.agents[node_id].report.remote())
        except Exception as error:
            if isinstance(error, TimeoutError):
                await self._late_agents.late(node_id)
            return
        self._late_agents.answered(node_id)
        self.answered.add(node_id)
        if node_id in self.reports:
            self.reports[node_id], self.lost_gpus[node_id] = still_there(report, self._first_gpus[node_id])

    async def find_silent(self, raw: Mapping[str, RayNode], token: str | None) -> None:
        """Check whether the raylet of every node with an agent answers."""
        wanted = sorted(node_id for node_id, node in raw.items() if node.alive and node_id in self.agents)
        well = await asyncio.gather(*(self._ray.call(answers, raw[node_id], token) for node_id in wanted))
        self.silent = {
            node_id: "its raylet does not answer; Ray has not declared it dead yet"
            for node_id, answered in zip(wanted, well, strict=True)
            if not answered
        }

    def agent_for(self, node_id: str) -> Any | None:
        """Return the agent that answers for a node; an embedded head's node is the same machine under every id."""
        if node_id in self.agents or not self._maker.embedded:
            return self.agents.get(node_id)
        return next(iter(self.agents.values()), None)

    async def until_fenced(self, node_id: str) -> None:
        """Return once a node that Ray has given up can run nothing more: the leases of its rank actors have expired."""
        since = self._dead_since.setdefault(node_id, time.monotonic())
        await asyncio.sleep(max(0.0, since + FENCE_SECONDS - time.monotonic()))

    def forget_all(self) -> None:
        """Drop all nodes: Ray's head has died, and every agent with it."""
        self.agents, self.reports, self.lost_gpus = {}, {}, {}
        for task in self._meetings.values():
            task.cancel()
        self._meetings.clear()

    async def end_meetings(self) -> None:
        """Stop adding nodes."""
        for task in self._meetings.values():
            task.cancel()
        await asyncio.gather(*self._meetings.values(), return_exceptions=True)
        self._meetings.clear()

    async def shut_down(self) -> None:
        """End all agents' processes; on a shared cluster also remove the nodes' directories."""
        await asyncio.gather(*(self._shut_down(agent) for agent in self.agents.values()))

    async def _shut_down(self, agent: Any) -> None:
        with contextlib.suppress(Exception):  # the agent has already ended
            await within(CALL_SECONDS, agent.shut_down.remote(remove=not self._maker.embedded))
