"""Finds, creates and removes a gang's placement group and rank actors in Ray. Calls block; gangs.py runs them in threads.

An actor's name contains the gang that it was created for, so actors of an earlier daemon are found again and none is created twice.
Gangs that ended well are parked for PARKED_SECONDS (``reuse/``), and serve the next job of the same shape. This module
does not depend on what a rank does.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any, Final

import structlog

from orchestrator import clock
from orchestrator.core.facts.gangs import ActorMissing, HeadLost, NodeLost, ResourcesTaken, StoppedUnplaced
from orchestrator.core.scheduler.resources import rank_size
from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.gangs.reuse.origin import Origin, origin_of
from orchestrator.runtime.gangs.reuse.parked_gangs import PARKED_SECONDS
from orchestrator.runtime.gangs.reuse.served_actor import handle_of, served
from orchestrator.runtime.names import gang_name, gang_of, placement_group_name, rank_actor_name
from orchestrator.runtime.nodes import control_plane
from orchestrator.runtime.ranks.runtime_env import for_ray

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.gangs.reuse.parked_gangs import ParkedGangs
    from orchestrator.runtime.nodes.directories import Site

log = structlog.get_logger("orch.ray")

PARK_SECONDS: Final = 5.0
"""An actor that takes longer to retire, or to serve another gang, is removed."""

PLACEMENT_SECONDS: Final = 1.0
ROOM_SECONDS: Final = 1.0
_ROOM_POLL_SECONDS: Final = 0.005
SHARED_PLACEMENT_SECONDS: Final = 10.0


class RayRankActors:
    """Rank actors of the cluster at ``site``; ``nodes`` has its nodes, ``parked`` the gang that serves each job."""

    def __init__(self, site: Site, ray: RayConnection, nodes: NodeRegistry, parked: ParkedGangs) -> None:
        self._site = site
        self._ray = ray
        self._nodes = nodes
        self._parked = parked

    def find_or_create(self, job: Job, *, create: bool) -> list[Any]:
        """Return the gang's actors by rank; ``create`` creates the missing ones of a gang that was never placed.

        Raises GangLostError: an actor of a placed gang has ended, a node of the gang has left, or there is no gang.
        """
        found = self._find(job, everywhere=not create)
        origin = self._parked.serving(job)
        taken = origin is not None and origin != origin_of(job)
        # An earlier daemon may have died after it took the gang, before the actors were told or that was recorded.
        if None not in found and (job.seats or not taken or self._assign(job, found)):
            return found
        if job.seats:
            raise GangLostError(ActorMissing(rank=found.index(None)))
        if not create:
            raise GangLostError(StoppedUnplaced())
        if not set(job.nodes) <= set(self._nodes.agents):
            # Ray would wait for the node for ever. On an embedded head's machine locks show when the ranks have ended.
            raise GangLostError(NodeLost(), node_lost=not self._site.embedded)
        if taken:
            self.remove(job)
            found = [None] * job.num_workers
        if not any(found) and (actors := self._take(job)):
            return actors
        return self._create(job, found)

    def remove(self, job: Job) -> None:
        """Kill the gang's actors and free its placement group's reservation. Idempotent."""
        origin = self._parked.serving(job)
        if origin is not None:  # else the gang serves another job by now
            self._remove(origin, job.num_workers)

    def park(self, job: Job, actors: Sequence[Any]) -> bool:
        """Keep the gang for another job if its actors retain nothing of this one; return whether it is kept.

        On False its actors may have retired: remove the gang.
        """
        import ray

        if not self._parked.may_park(job):
            return False
        try:
            user = gang_name(job.id, job.gang)
            left = ray.get([handle_of(actor).retire.remote(user) for actor in actors], timeout=PARK_SECONDS)
            if any(left):
                log.info("gang.not_parked", job=job.id, left=left)
                return False
            self._parked.park(job)
        except Exception as error:  # removing the gang is always safe
            log.warning("gang.not_parked", job=job.id, why=str(error).partition("\n")[0])
            return False
        return True

    def remove_parked(self, seconds: float = PARKED_SECONDS) -> bool:
        """Remove gangs that have been parked for ``seconds``; return whether others are parked."""
        for origin in self._parked.over(seconds):
            self._remove(origin, 0)
        return self._parked.any_parked

    def end_unknown(self, jobs: Collection[Job]) -> dict[Origin, int]:
        """Remove the gangs that none of ``jobs`` holds, nor an earlier daemon has parked; return them with their ranks."""
        from ray.util import list_named_actors

        known = {self._parked.serving(job) for job in jobs if job.gang_open} | set(self._parked.over(0.0))
        unknown: dict[Origin, int] = {}
        for name in list_named_actors():
            if (found := gang_of(name)) is not None and (origin := Origin(*found[:2])) not in known:
                unknown[origin] = max(unknown.get(origin, 0), found[2] + 1)
        for origin, ranks in unknown.items():
            self._remove(origin, ranks)
        return unknown

    def _remove(self, origin: Origin, ranks: int) -> None:
        """Remove a gang; Ray kills actors with their placement group. ``ranks``: how many actors to kill at once."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for rank in range(ranks):
            with contextlib.suppress(ValueError):
                ray.kill(self._actor(origin, rank), no_restart=True)
        if group := _find_group(origin, self._site.namespace):
            remove_placement_group(group)
        self._parked.removed(origin)

    def _take(self, job: Job) -> list[Any]:
        """Assign a parked gang to the job and return its actors; empty if there is none."""
        while (origin := self._parked.take(job)) is not None:
            actors = self._actors(origin, job)
            if None not in actors and self._assign(job, actors):
                return actors
            self._remove(origin, job.num_workers)
        return []

    def _assign(self, job: Job, actors: Sequence[Any]) -> bool:
        """Assign actors that have retired, or already serve the job, to it; return whether all serve it."""
        import ray

        try:
            calls = [handle_of(actor).take.remote(job.id, job.gang, job.attempt_number) for actor in actors]
            ray.get(calls, timeout=PARK_SECONDS)
        except Exception as error:  # one has ended, or does not answer
            log.warning("gang.not_taken", job=job.id, why=str(error).partition("\n")[0])
            return False
        return True

    def _actors(self, origin: Origin, job: Job) -> list[Any]:
        """Return the job's handles of a gang's actors, None for a missing one."""
        found: list[Any] = []
        for rank in range(job.num_workers):
            try:
                found.append(served(self._actor(origin, rank), gang_name(job.id, job.gang)))
            except ValueError:
                found.append(None)
        return found

    def _actor(self, origin: Origin, rank: int) -> Any:
        """Return Ray's handle. Raises ValueError."""
        import ray

        return ray.get_actor(rank_actor_name(origin.job_id, origin.gang, rank), namespace=self._site.namespace)

    def _find(self, job: Job, *, everywhere: bool) -> list[Any]:
        """Find existing actors, None for missing ones; Ray is not queried for actors that cannot exist yet."""
        origin = self._parked.serving(job)
        known = everywhere or job.seats or job.attempt_number > 1 or _may_exist(job) or origin != origin_of(job)
        return self._actors(origin, job) if origin is not None and known else [None] * job.num_workers

    def _create(self, job: Job, found: list[Any]) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle, epoch = _bundle(job), self._ray.epoch
        self._parked.created(job)
        self.remove_parked(PARKED_SECONDS if _has_room(job, bundle) else 0.0)
        _wait_for_room(job, bundle)
        group = _placement_group(job, bundle, self._site.namespace)
        # Ray queues actors that are requested before their bundles are reserved, and retries them late.
        if not group.wait(timeout_seconds=PLACEMENT_SECONDS if self._site.embedded else SHARED_PLACEMENT_SECONDS):
            self._refuse_on_shared()
        actor_class = _actor_class()
        runtime_env = for_ray(job.spec.runtime_env, self._site.paths.modules(job.id))
        actors = []
        for rank, node_id in enumerate(job.nodes):
            if found[rank] is not None:
                actors.append(found[rank])
                continue
            if self._ray.epoch != epoch:
                raise GangLostError(HeadLost())
            created = actor_class.options(
                name=rank_actor_name(job.id, job.gang, rank),
                namespace=self._site.namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                memory=bundle.get("memory"),
                max_restarts=0,
                max_concurrency=64,
                runtime_env=runtime_env or None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=rank
                ),
            ).remote(
                job_id=job.id,
                gang=job.gang,
                rank=rank,
                node_dir=str(self._site.node_dir(node_id)),
                attempt=job.attempt_number,
                leased=not self._site.embedded,
            )
            actors.append(served(created, gang_name(job.id, job.gang)))
        return actors

    def _refuse_on_shared(self) -> None:
        """Reject a gang that does not fit an existing cluster any more: the job returns to the queue and may go elsewhere."""
        if not self._site.embedded:
            raise GangLostError(ResourcesTaken())


@functools.cache
def _actor_class() -> Any:
    """Return Ray's class of rank actors: the only one, as Ray keeps a copy of each for the daemon's life."""
    import ray

    from orchestrator.runtime.ranks.rank_actor import RankActor

    return ray.remote(RankActor)


def _may_exist(job: Job) -> bool:
    """Whether an earlier daemon may have created the actors and died before it recorded that."""
    return clock.now() - job.state_since > 1.0


def _wait_for_room(job: Job, bundle: dict[str, float]) -> None:
    """Wait until Ray's control plane lists the resources of a gang released a moment ago as free, at most ROOM_SECONDS.

    Ray retries a placement group that does not fit at first only once a second. Where other users hold the resources,
    the group is requested without waiting.
    """
    deadline = time.monotonic() + ROOM_SECONDS
    while time.monotonic() < deadline and not _has_room(job, bundle):
        time.sleep(_ROOM_POLL_SECONDS)


def _has_room(job: Job, bundle: dict[str, float]) -> bool:
    """Whether the gang fits into the resources that Ray's control plane lists as free."""
    free = control_plane.available()
    return all(
        free.get(node_id, {}).get(name, 0.0) >= amount * job.nodes.count(node_id) - 1e-6
        for node_id in set(job.nodes)
        for name, amount in bundle.items()
    )


def _placement_group(job: Job, bundle: dict[str, float], namespace: str) -> Any:
    from ray.util.placement_group import placement_group

    if _may_exist(job) and (group := _find_group(origin_of(job), namespace)):
        return group
    return placement_group(
        [bundle] * job.num_workers,
        strategy="SPREAD" if len(set(job.nodes)) > 1 else "PACK",
        name=placement_group_name(job.id, job.gang),
        lifetime="detached",
        bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in job.nodes],
    )


def _find_group(origin: Origin, namespace: str) -> Any | None:
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    found = control_plane.group(placement_group_name(origin.job_id, origin.gang), namespace)
    return PlacementGroup(PlacementGroupID(found.id)) if found else None


def _bundle(job: Job) -> dict[str, float]:
    cpus, gpus, memory = rank_size(job)
    asked = {"CPU": cpus, "GPU": gpus, "memory": float(memory)}
    return {name: amount for name, amount in asked.items() if amount}
