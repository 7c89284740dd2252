"""The daemon's own state, for users and for probes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import __version__
from orchestrator.api import views as v
from orchestrator.api.protocol import PROTOCOL_VERSION
from orchestrator.api.server.gate import user_name
from orchestrator.core.scheduler.resources import left_on
from orchestrator.runtime.forkserver.cgroups import memory_group
from orchestrator.store.errors import damaged_sentence, disk_remedy, disk_sentence

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from orchestrator.daemon.loop import Loop
    from orchestrator.runtime.pools import Pools
    from orchestrator.store.port import DamagedRecord, Store


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
