"""Keeps the loop's view of the cluster's nodes current, has their health checked, and restarts Ray's head after its death.

Also keeps what the next gang needs warm: a fork server on each node, and idle workers of Ray, some of which each gang uses. An idle
worker, like any of Ray's, wakes up a hundred times a second. So none is made while the nodes are full and no job waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api.errors import DaemonStoppingError
from orchestrator.core.cluster import EPSILON
from orchestrator.core.events import GangReleased
from orchestrator.core.facts.faults import CheckFailed
from orchestrator.runtime.deadline import OvertakenError, unless, within
from orchestrator.store.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.cluster import Node
    from orchestrator.core.events import Event
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.live_jobs import LiveJobs
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.nodes.quarantine import NodeQuarantine
    from orchestrator.daemon.stopping import StopRequest
    from orchestrator.runtime.cluster.cluster import Cluster
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.store.store import Store

REFRESH_SECONDS: Final = 10.0
SHARED_REFRESH_SECONDS: Final = 2.0  # on an existing cluster nodes change, and other users take free resources
TIDY_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 10.0
NODE_CHECK_SECONDS: Final = 150.0
HEAD_RETRY_SECONDS: Final = 2.0


class LoopNodes:
    """Passes the nodes to the loop, with marks on cordoned and quarantined ones."""

    def __init__(self, loop: Loop, quarantine: NodeQuarantine, stop: StopRequest) -> None:
        self._loop = loop
        self._quarantine = quarantine
        self._stop = stop
        self._known = asyncio.Event()

    def set(self, nodes: Mapping[str, Node]) -> None:
        """Set the nodes that the cluster reports."""
        marked = self._quarantine.mark(nodes)
        if self._stop.drains:
            return
        self._loop.set_nodes(marked)
        if any(n.alive for n in marked.values()):
            self._known.set()

    def mark_again(self) -> None:
        """Mark the nodes after a change of a cordon or a quarantine."""
        self.set(dict(self._loop.nodes))

    def forget(self) -> None:
        """Drop all nodes: the cluster is gone, and nothing may be placed."""
        self._known.clear()
        self._loop.set_nodes({})

    async def wait(self, seconds: float) -> None:
        """Wait until there are nodes. Raises DaemonStoppingError when they do not appear."""
        try:
            async with asyncio.timeout(seconds):
                await self._known.wait()
        except TimeoutError as error:
            raise DaemonStoppingError("the cluster has not come up; `orch doctor` looks for the reason") from error


class NodeCare:
    """Reads the nodes from the cluster periodically.

    ``after`` follows each round; ``tidy`` makes nodes of a shared cluster remove files of ended jobs, now and then;
    ``spawn`` runs a background task. ``problems`` reports errors to users.
    """

    def __init__(
        self,
        cluster: Cluster,
        nodes: LoopNodes,
        *,
        after: Callable[[], Awaitable[None]],
        tidy: Callable[[], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        problems: dict[str, str],
    ) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._after = after
        self._tidy = tidy
        self._spawn = spawn
        self._problems = problems

    async def run(self) -> None:
        """Run rounds until cancelled."""
        tidied = 0.0
        while True:
            await asyncio.sleep(REFRESH_SECONDS if self._cluster.site.embedded else SHARED_REFRESH_SECONDS)
            if not self._cluster.site.embedded and time.monotonic() - tidied > TIDY_SECONDS:
                tidied = time.monotonic()
                self._spawn(self._tidy())
            await self.look()

    async def look(self) -> None:
        """Run one round, if there is a head that answers; report errors."""
        await self._cluster.check_head()
        if not self._cluster.connected:
            return
        try:
            await self.refresh()
            self._problems.pop("nodes", None)
        except Exception as error:
            self._problems["nodes"] = f"the cluster's nodes could not be listed: {error}"

    async def refresh(self) -> None:
        """Run one round. Raises the cluster's errors."""
        self._nodes.set(await self._cluster.refresh())
        await self._after()


async def check_node(agent: Any | None) -> tuple[Fact, ...]:
    """Return what is wrong with a node, by its agent; ``agent`` None: the node has none."""
    if agent is None:
        return (CheckFailed(),)
    try:
        problems: tuple[Fact, ...] = await within(NODE_CHECK_SECONDS, agent.check())
    except TimeoutError:
        return (CheckFailed(seconds=NODE_CHECK_SECONDS),)
    except Exception as error:
        return (CheckFailed(said=str(error) or type(error).__name__),)
    return problems


class NodeHealth:
    """Health of nodes. ``nodes`` marks them; ``reserve`` keeps bad GPUs from Ray; ``spawn`` runs a background task."""

    def __init__(
        self,
        quarantine: NodeQuarantine,
        store: Store,
        ray: RayConnection,
        registry: NodeRegistry,
        nodes: LoopNodes,
        *,
        reserve: Callable[[], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        log: FilteringBoundLogger,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._quarantine = quarantine
        self._store = store
        self._ray = ray
        self._registry = registry
        self._nodes = nodes
        self._reserve = reserve
        self._spawn = spawn
        self._log = log
        self._pause = pause

    def observe(self, job: Job, event: Event) -> None:
        """Handle a written event."""
        if self._quarantine.observe(job, event):
            self._log.warning("node.quarantined", job=job.id)
            self._nodes.mark_again()
        self._spawn(self._save())
        if isinstance(event, GangReleased) and self._quarantine.quarantined_gpus:
            self._spawn(self._reserve())

    async def _save(self) -> None:
        """Store what changed; after a failure the next round tries again."""
        places = self._quarantine.unsaved()
        try:
            await self._store.put_places(places)
        except StoreError as error:
            self._quarantine.keep(places)
            self._log.warning("quarantine.not_saved", error=str(error))

    async def run(self) -> None:
        """Run rounds until cancelled."""
        while True:
            await self._pause(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Check nodes that are due, store changes, and keep bad GPUs reserved."""
        if self._ray.connected and await self._quarantine.look(self._check):
            self._nodes.mark_again()
        await self._save()
        with contextlib.suppress(Exception):  # errors of a restarting Ray: the next round tries again
            await self._reserve()

    async def _check(self, node_id: str) -> tuple[Fact, ...]:
        return await check_node(self._registry.agent_for(node_id))


class HeadCare:
    """Restarts the head. ``forget`` are called after its death, to drop what died with it; ``prepare`` prepares a new one; ``wake`` wakes the loop.

    ``problems`` reports errors to users.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        forget: Sequence[Callable[[], None]],
        prepare: Sequence[Callable[[], Awaitable[None]]],
        wake: Callable[[], None],
        problems: dict[str, str],
        log: FilteringBoundLogger,
        retry_seconds: float = HEAD_RETRY_SECONDS,
    ) -> None:
        self._cluster = cluster
        self._forget = forget
        self._prepare = prepare
        self._wake = wake
        self._problems = problems
        self._log = log
        self._retry_seconds = retry_seconds
        self._gone = asyncio.Event()

    def lost(self) -> None:
        """Record the head's death."""
        self._log.error("ray.head_lost", address=self._cluster.address)
        self._problems["ray"] = "Ray's head died and is being started again"
        for forget in self._forget:
            forget()
        self._gone.set()

    async def run(self) -> None:
        """Restart the head whenever it has died, with as many tries as it takes."""
        while True:
            await self._gone.wait()
            self._gone.clear()
            try:
                await self._cluster.restart()
                with contextlib.suppress(OvertakenError):  # it died too: calls to it may never return
                    await unless(self._gone, self._prepare_all())
            except Exception as error:  # any error of a starting Ray: the next try may succeed
                self._problems["ray"] = str(error) or type(error).__name__
                self._log.exception("ray.restart_failed")
                self._gone.set()
                await asyncio.sleep(self._retry_seconds)
            if not self._gone.is_set():
                self._problems.pop("ray", None)
                self._wake()

    async def _prepare_all(self) -> None:
        for prepare in self._prepare:
            await prepare()


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
