"""The daemon's own state, for users and for probes."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator import __version__
from orchestrator.api import views as v
from orchestrator.api.protocol import PROTOCOL_VERSION
from orchestrator.api.server.gate import user_name
from orchestrator.core.scheduler.placement import left_on
from orchestrator.runtime.deadline import within
from orchestrator.runtime.forkserver.cgroups import memory_group
from orchestrator.store.errors import damaged_sentence, disk_remedy, disk_sentence
from orchestrator.units import duration

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from orchestrator.daemon.loop import Loop
    from orchestrator.runtime.pools import Pools
    from orchestrator.store.records import DamagedRecord
    from orchestrator.store.store import Store


@dataclass(slots=True, kw_only=True)
class Endpoints:
    """Addresses of the daemon and of what it started; filled in as they come up."""

    home: str
    started_at: float
    read_address: str = ""
    prometheus_url: str = ""
    alertmanager_url: str = ""
    prometheus_password_file: str = ""
    page_address: str = ""


class DaemonHealth:
    """State of the daemon. ``known`` are recorded problems by part; ``ready`` is set when gangs can be placed."""

    def __init__(
        self,
        loop: Loop,
        store: Store,
        pools: Pools,
        *,
        known: dict[str, str],
        ready: asyncio.Event,
        endpoints: Endpoints,
        ray_address: Callable[[], str],
        ray_problem: Callable[[], str],
        simulated_gpus: Callable[[], int],
    ) -> None:
        self._loop = loop
        self._store = store
        self._pools = pools
        self._known = known
        self._ready = ready
        self._endpoints = endpoints
        self._ray_address = ray_address
        self._ray_problem = ray_problem
        self._simulated_gpus = simulated_gpus
        self._memory_limits = memory_group()
        self.damaged: list[DamagedRecord] = []

    def problems(self) -> list[str]:
        """Return what is wrong with the daemon, for users."""
        found = list(self._known.values())
        if problem := self._ray_problem():
            found.append(problem)
        if self._loop.blocked_by_disk:
            found.append(f"decisions cannot be written: {self._loop.blocked_by_disk}")
        return found + self._pools.problems()

    def not_ready(self) -> list[str]:
        """Return known obstacles to jobs, without calling the parts."""
        starting = [] if self._ready.is_set() else ["the daemon is still starting"]
        return [*self.problems(), *self._disk(), *starting]

    def _disk(self) -> list[str]:
        """Return why the disk takes no new job. The daemon starts, and running jobs continue."""
        trouble, home = self._store.disk().trouble, Path(self._endpoints.home)
        if trouble is None:
            return []
        return [f"{disk_sentence(trouble, home)}, so no new job is accepted: {disk_remedy(trouble, home)}"]

    async def loop_turns(self) -> None:
        """Wait until the loop that decides has completed a round."""
        if self._ready.is_set():
            await self._loop.command(list)

    async def view(self) -> v.HealthView:
        """Return the whole state."""
        nodes, places = self._loop.nodes.values(), self._endpoints
        left = left_on((n for n in nodes if n.alive), self._loop.jobs.begun.values())
        counts = await self._store.state_counts()
        return v.HealthView(
            ready=self._ready.is_set() and not self.problems(),
            version=__version__,
            protocol=PROTOCOL_VERSION,
            pid=os.getpid(),
            owner=user_name(os.getuid()),
            started_at=places.started_at,
            home=places.home,
            ray_address=self._ray_address(),
            simulated_gpus=self._simulated_gpus(),
            read_address=places.read_address,
            prometheus_url=places.prometheus_url,
            alertmanager_url=places.alertmanager_url,
            prometheus_password_file=places.prometheus_password_file,
            page_address=places.page_address,
            counts={state.value: count for state, count in counts.items()},
            nodes=sum(n.alive for n in nodes),
            gpus_total=sum(n.gpus for n in nodes if n.alive),
            gpus_free=sum(max(0.0, f.gpus) for f in left.values()),
            problems=(*self.problems(), *self._disk(), *map(damaged_sentence, self.damaged)),
            memory_limits=self._memory_limits,
        )


PART_SECONDS: Final = 2.0
FRESH_SECONDS: Final = 1.0
"""Time for which an answer is cached: any process of the machine may request it, at any rate."""


class Readiness:
    """Readiness. ``known`` returns recorded problems; ``parts`` are named calls that return if the part works."""

    def __init__(
        self,
        known: Callable[[], Sequence[str]],
        parts: Mapping[str, Callable[[], Awaitable[Any]]],
        *,
        part_seconds: float = PART_SECONDS,
        fresh_seconds: float = FRESH_SECONDS,
    ) -> None:
        self._part_seconds = part_seconds
        self._fresh_seconds = fresh_seconds
        self._known = known
        self._parts = parts
        self._asking: asyncio.Task[list[str]] | None = None
        self._asked_at = float("-inf")

    async def problems(self) -> list[str]:
        """Return why no job can be accepted and placed now; nothing where one can."""
        if self._asking is None or (self._asking.done() and time.monotonic() - self._asked_at > self._fresh_seconds):
            self._asked_at = time.monotonic()
            self._asking = asyncio.create_task(self._probe(), name="readiness")
        return [*self._known(), *await asyncio.shield(self._asking)]

    async def _probe(self) -> list[str]:
        found = await asyncio.gather(*(self._one(name, part) for name, part in self._parts.items()))
        return [problem for problem in found if problem]

    async def _one(self, name: str, part: Callable[[], Awaitable[Any]]) -> str:
        try:
            await within(self._part_seconds, part())
        except TimeoutError:
            return f"{name} gives no answer within {duration(self._part_seconds)}"
        except Exception as error:
            return f"{name} does not work: {error}"
        return ""


def readiness_of(
    known: Callable[[], Sequence[str]], store: Callable[[], Awaitable[Any]], loop: Callable[[], Awaitable[Any]]
) -> Readiness:
    """Return the daemon's readiness: its store, its loop, and the general thread pool."""
    parts: dict[str, Callable[[], Awaitable[Any]]] = {
        "the store": store,
        "the loop that decides": loop,
        "the pool of threads": lambda: asyncio.to_thread(time.monotonic),
    }
    return Readiness(known, parts)
