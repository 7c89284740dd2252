"""The daemon's Ray cluster: an embedded head that outlives the daemon, or an existing cluster.

Starts and stops what the other modules of this package own: the connection, the head, the node agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from orchestrator.private_files import make_private
from orchestrator.runtime.cluster.connection import CALL_SECONDS, RayConnection
from orchestrator.runtime.cluster.head import (
    START_TRIES,
    ClusterError,
    EmbeddedHead,
    idle_workers,
    outlive_raylets,
    start_seconds,
)
from orchestrator.runtime.cluster.nodes import (
    Capacity,
    GpuReservations,
    LastSeen,
    NodeRegistry,
    keep_home_token,
    make_agent,
    remove_services,
)
from orchestrator.runtime.nodes import control_plane
from orchestrator.runtime.nodes.directories import Site, check_places
from orchestrator.spec import token_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from orchestrator.core.cluster import Node
    from orchestrator.runtime.nodes.control_plane import RayNode
    from orchestrator.spec.paths import Paths

log = structlog.get_logger("orch.ray")

LEAVE_SOON_SECONDS: Final = 5.0
AGAIN_SECONDS: Final = 0.5
LIST_SECONDS: Final = 5.0
KEEP_ALIVE_SECONDS: Final = 24 * 3600
GUEST_KEEP_ALIVE_SECONDS: Final = 600  # then an existing cluster gets its memory back


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options of a cluster. ``address`` None: an embedded head. ``simulate_gpus`` is per node; 0 uses the real GPUs."""

    address: str | None = None
    simulate_gpus: int = 0
    num_cpus: int | None = None
    warm_workers: int = 2


class Cluster:
    """Owns the connection ``ray``, the known ``nodes``, and the GPU reservations ``holds``.

    ``on_lost`` is called in the loop's thread when the embedded head has died. ``own_groups`` names the placement groups
    that this daemon's jobs hold.
    """

    def __init__(
        self,
        paths: Paths,
        options: ClusterOptions,
        *,
        on_lost: Callable[[], None],
        own_groups: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._warm_workers = options.warm_workers
        self._on_lost = on_lost
        self.site = Site(paths, options.address)
        self.ray = RayConnection(self.site.namespace)
        self._simulate_gpus = options.simulate_gpus
        self._home_token = ""
        self.nodes = NodeRegistry(self.ray, self._make_agent, embedded=self.site.embedded)
        self.holds = GpuReservations(self.ray)
        self._seen = LastSeen(self.site.last_seen_file)
        self._capacity = Capacity(self.ray, self.nodes, self.holds, own_groups, self._seen)
        self._head = (
            EmbeddedHead(
                self.site,
                num_cpus=options.num_cpus,
                simulate_gpus=options.simulate_gpus,
                on_died=self._lost,
            )
            if self.site.embedded
            else None
        )

    @property
    def address(self) -> str:
        """Address of the Ray head."""
        return self._head.address if self._head is not None else self.site.address or ""

    @property
    def connected(self) -> bool:
        """Whether Ray accepts calls."""
        return self.ray.connected

    async def start(self) -> None:
        """Find or start the head, connect, and put an agent on every node. Raises ClusterError."""
        try:
            make_private(self.site.paths.ray)
            if self.site.embedded:
                check_places(self.site.namespace)
        except OSError as error:
            raise ClusterError(str(error)) from error
        self._home_token = keep_home_token(self.site.home_token)
        outlive_raylets()
        try:
            address = await self._find_address()
        except token_file.TokenFileError as error:
            raise ClusterError(f"{error.message}; {error.remedy}" if error.remedy else error.message) from error
        hint = f"; its logs are below {self.site.paths.ray}" if self.site.embedded else ""
        await self.ray.enter(address, hint=hint)
        await self._meet_nodes(hint)
        self.ray.opened()
        await self.warm()

    async def _meet_nodes(self, hint: str) -> None:
        """Read the nodes for the first time. Ray ends a worker that does not start in a minute, and starts another."""
        epoch, seconds = self.ray.epoch, START_TRIES * start_seconds()
        deadline = time.monotonic() + seconds
        while True:
            try:
                await self.refresh()
            except TimeoutError as error:
                self.ray.problem = f"the node's agent has not answered yet: Ray is slow to start its process{hint}"
                if self.ray.epoch != epoch or time.monotonic() > deadline:
                    raise ClusterError(f"the node's agent did not answer within {seconds:.0f} s{hint}") from error
                log.warning("ray.agent_late", seconds_left=round(deadline - time.monotonic()))
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                return

    async def _find_address(self) -> str:
        if self._head is not None:
            return await self._head.ensure()
        refuse_exposed_token(os.environ)
        return self.address

    def _make_agent(self, node_id: str) -> Any:
        return make_agent(self.site, node_id, self._simulate_gpus, self._home_token)

    async def refresh(self) -> dict[str, Node]:
        """Read the nodes anew: create agents on new nodes, drop those of dead nodes."""
        epoch = self.ray.epoch
        raw = await self.ray.call(control_plane.nodes)
        if self._head is not None and _all_dead(raw):
            await self._give_up_head(epoch)
        await self.nodes.update(raw)
        if not self.site.embedded:
            await self._capacity.look_at_others(raw)
            await self.nodes.find_silent(raw)
        self._seen.note(raw, self.nodes.reports, self.nodes.answered)
        await self.ray.call(self._seen.write)
        return self._capacity.nodes(raw)

    async def warm(self, placed: Mapping[str, int] | None = None) -> None:
        """Start idle workers, so that the next gang's actors start at once.

        ``placed`` gives the number of a gang's ranks by node: on an existing cluster, as many workers start on those
        nodes. An embedded head keeps at least ``warm_workers``: another job may follow at once.
        """
        if not (self._warm_workers and self.ray.connected):
            return
        with contextlib.suppress(Exception):  # actors merely start slower
            await self.ray.call(self._prestart, placed or {})

    def _prestart(self, placed: Mapping[str, int]) -> None:
        """Request the idle workers that are missing: Ray adds them to those that exist, some of them from an earlier daemon."""
        for node in control_plane.nodes().values():
            if not (node.alive and node.total.get("CPU")):  # a head without CPUs takes no ranks
                continue
            if self._head is None:
                count, keep_alive = (placed.get(node.id, 0) if placed else self._warm_workers), GUEST_KEEP_ALIVE_SECONDS
            elif (raylet := self._head.raylet_pid) is None:
                return
            else:
                wanted = max(sum(placed.values()), self._warm_workers)
                count, keep_alive = wanted - idle_workers(raylet), KEEP_ALIVE_SECONDS
            if count > 0:
                control_plane.prestart_workers(node, count, keep_alive)

    async def check_head(self, *, node_lost: bool = False) -> None:
        """Report the loss of an embedded head that accepts no connections any more, before its processes have ended.

        Call after anything that the head's end may have caused: no work may start on a head that is ending.
        ``node_lost``: an actor has ended with its node, as after the raylet was terminated. Ray then counts the head's
        only node as dead, while the raylet's process lives for ten more seconds.
        """
        if self._head is None or not self.ray.connected:
            return
        epoch = self.ray.epoch
        if await self._head.is_ending() or (node_lost and await self._only_node_is_dead()):
            await self._give_up_head(epoch)

    async def _only_node_is_dead(self) -> bool:
        try:
            return _all_dead(await self.ray.call(control_plane.nodes, seconds=LIST_SECONDS))
        except Exception:  # a head that does not answer is detected in other ways
            return False

    async def _give_up_head(self, epoch: int) -> None:
        """Report the loss of an embedded head that still has processes, if it is connected and the head of ``epoch``.

        Ray never readmits a node that it has declared dead, and a raylet never ends if it is stopped, or waits at its
        end for a worker of which it has no record.
        """
        if self._head is not None and self.ray.connected and self.ray.epoch == epoch:
            self._head.unwatch()
            self._lost()
            await asyncio.sleep(0)  # a caller that worked for a gang of that head is cancelled here

    def _lost(self) -> None:
        self.ray.lost()
        self.nodes.forget_all()  # a round that waits for an agent of that head continues
        self._on_lost()

    async def restart(self) -> None:
        """Recover from the embedded head's death: remove what is left of it, start a new head, connect."""
        assert self._head is not None
        self._head.unwatch()
        self.nodes.forget_all()
        self.holds.forget_all()
        await self._head.end()
        # Disconnecting from a dead cluster takes Ray some seconds; the new head starts meanwhile, and start() finds it.
        await asyncio.gather(self.ray.leave(), self._head.start())
        await self.start()

    async def abandon(self) -> None:
        """Undo a failed start: end the head and the fork server that this process started."""
        if self._head is not None:
            self._head.unwatch()
        await self.nodes.end_meetings()
        self.ray.closed()
        await self.ray.end_entering()
        await self.ray.leave(LEAVE_SOON_SECONDS)
        if self._head is not None:
            await self._head.take_back()

    async def stop(self, *, stop_head: bool) -> None:
        """Disconnect. ``stop_head`` also ends the embedded head, or removes orch's actors from an existing cluster."""
        if self._head is not None:
            self._head.unwatch()
        await self.nodes.end_meetings()
        if stop_head:
            await self.nodes.shut_down()
            if self._head is None:
                with contextlib.suppress(Exception):  # a cluster that does not answer keeps its actors
                    await self.ray.call(remove_services, self.site.namespace)
        await self.ray.end_entering()
        await self.ray.leave(CALL_SECONDS)
        self.ray.closed()
        if stop_head and self._head is not None and self._head.address:
            await self._head.end()
            await asyncio.to_thread(self.site.remove_node_state)


def _all_dead(nodes: Mapping[str, RayNode]) -> bool:
    return bool(nodes) and not any(node.alive for node in nodes.values())


def refuse_exposed_token(environ: Mapping[str, str]) -> None:
    """Raise TokenExposedError when other users can read the token file that Ray's own clients would use."""
    if environ.get("RAY_AUTH_MODE", "").lower() != "token" or environ.get("RAY_AUTH_TOKEN"):
        return
    try:
        token_file.read(Path(environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"))
    except token_file.TokenExposedError:
        raise
    except token_file.TokenFileError:
        pass  # Ray says what is wrong with it
