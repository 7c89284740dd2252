"""Keeps what the next gang needs warm: a fork server on each node, and idle workers of Ray, some of which each gang uses.

An idle worker, like any of Ray's, wakes up a hundred times a second. So none is made while the nodes are full and no job waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.cluster import EPSILON

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.live_jobs import LiveJobs

WARM_LATER_SECONDS: Final = 0.3
MAX_WARM_WORKERS: Final = 8
FORK_SERVER_SECONDS: Final = 60.0


class IdleWorkers:
    """Requests idle workers after each placed gang.

    ``warm`` requests a number of them by node; ``spawn`` runs a background task. Where ``useful`` is false the request waits until it is true.
    """

    def __init__(
        self,
        warm: Callable[[Mapping[str, int]], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        *,
        useful: Callable[[], bool],
        later_seconds: float = WARM_LATER_SECONDS,
    ) -> None:
        self._warm = warm
        self._spawn = spawn
        self._useful = useful
        self._later_seconds = later_seconds
        self._warmed_for: dict[JobId, int] = {}
        self._lacking: Mapping[str, int] = {}

    def changed(self, job: Job) -> None:
        """Request workers when the job's gang was placed, or those that were not useful before."""
        if job.seats and self._warmed_for.get(job.id) != job.gang:
            self._warmed_for[job.id] = job.gang
            self._spawn(self._warm_later(job.nodes[:MAX_WARM_WORKERS]))
        elif self._lacking:
            self._spawn(self._make_up())

    def ended(self, job_id: JobId) -> None:
        """Forget the job; on the resources that it frees, idle workers may be useful again."""
        self._warmed_for.pop(job_id, None)
        if self._lacking:
            self._spawn(self._make_up())

    async def _warm_later(self, places: Sequence[str]) -> None:
        """Wait until the gang's start, with which new workers would compete, is over."""
        await asyncio.sleep(self._later_seconds)
        self._lacking = Counter(places)
        await self._make_up()

    async def _make_up(self) -> None:
        if self._lacking and self._useful():
            lacking, self._lacking = self._lacking, {}
            await self._warm(lacking)


def can_start_more(jobs: LiveJobs, nodes: Mapping[str, Node]) -> bool:
    """Whether a job waits, or the nodes have room for one: a GPU or a part of one, on nodes without any a part of a CPU."""
    if jobs.waiting:
        return True
    free = jobs.free(nodes).sums()
    return (free.gpus if any(node.gpus for node in nodes.values()) else free.cpus) > EPSILON


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
                await agent.fork_server(sys.executable)
