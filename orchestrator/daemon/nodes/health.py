"""Maintains the restrictions of nodes and GPUs: takes events, has nodes checked, stores changes, and reserves bad GPUs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.events import GangReleased
from orchestrator.core.facts.nodes import CheckFailed
from orchestrator.runtime.deadline import within
from orchestrator.store.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.events import Event
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.nodes.care import LoopNodes
    from orchestrator.daemon.nodes.quarantine import NodeQuarantine
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.store.port import Store

LOOK_SECONDS: Final = 10.0
NODE_CHECK_SECONDS: Final = 150.0


async def check_node(agent: Any | None) -> tuple[Fact, ...]:
    """Return what is wrong with a node, by its agent; ``agent`` None: the node has none."""
    if agent is None:
        return (CheckFailed(),)
    try:
        problems: tuple[Fact, ...] = await within(NODE_CHECK_SECONDS, agent.check.remote())
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
