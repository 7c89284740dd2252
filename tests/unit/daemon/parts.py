"""Stand-ins for the surroundings of the daemon's parts: a cluster with given nodes, tasks that a test runs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import structlog

from orchestrator.api.service import Caller
from orchestrator.daemon.loop import Loop
from orchestrator.store.store import Store
from tests.support.stores import new_store
from tests.unit.core.builders import make_spec, submission

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job

LOG = structlog.get_logger()
ADA = Caller(uid=1000, gid=1000, user="ada", is_owner=True)
BOB = Caller(uid=1001, gid=1001, user="bob", is_owner=False)


class FakeConnection:
    """A connection to Ray that a test can end."""

    def __init__(self) -> None:
        self.connected = True


class FakeRegistry:
    """A registry of the nodes that a test puts into it."""

    def __init__(self) -> None:
        self.agents: dict[str, Any] = {}
        self.reports: dict[str, Any] = {}
        self.lost_gpus: dict[str, Any] = {}

    def agent_for(self, node_id: str) -> Any:
        return self.agents.get(node_id)


class FakeCluster:
    """An embedded cluster with the nodes that a test has put into it."""

    def __init__(self) -> None:
        self.site = SimpleNamespace(embedded=True)
        self.connected = True
        self.address = "ray:6379"
        self.nodes: dict[str, Node] = {}
        self.restarts: list[Exception | None] = []
        self.refreshed = 0
        self.ending = False

    async def check_head(self) -> None:
        self.connected = self.connected and not self.ending

    async def refresh(self) -> dict[str, Node]:
        self.refreshed += 1
        return self.nodes

    async def restart(self) -> None:
        error = self.restarts.pop(0)
        if error is not None:
            raise error


class Spawned:
    """Keeps background tasks until a test lets them run."""

    def __init__(self) -> None:
        self.waiting: list[Coroutine[Any, Any, None]] = []

    def __call__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.waiting.append(coroutine)

    async def run(self) -> None:
        while self.waiting:
            await self.waiting.pop(0)


class Rounds:
    """A production loop on a store in memory, running inside the ``async with`` block."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or new_store()
        self.watchers: list[Callable[[Job], None]] = []
        self.loop = Loop(store=self.store, runtime=lambda: None, on_change=self._changed, on_end=self._changed, log=LOG)

    def _changed(self, job: Job) -> None:
        for watch in self.watchers:
            watch(job)

    async def accept(self, **fields: Any) -> Job:
        job, _ = await self.store.submit(submission(make_spec(**fields.pop("spec", {})), **fields))
        self.loop.add(job)
        return job

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.loop.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
