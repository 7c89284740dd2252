"""The gangs in Ray, and the state of those that the daemon has attached, each once.

An actor's name contains its gang, so actors of an earlier daemon are found again and none is created twice. Calls of Ray block; the
table runs them in threads, one after the other for each job.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator import clock
from orchestrator.core.facts.faults import ActorMissing, HeadLost, NodeLost, ResourcesTaken, StoppedUnplaced
from orchestrator.core.scheduler.placement import rank_size
from orchestrator.runtime import remote
from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.node_clock import NodeClock
from orchestrator.runtime.nodes import control_plane
from orchestrator.runtime.nodes.control_plane import upload_modules
from orchestrator.runtime.nodes.directories import gang_of, placement_group_name, rank_actor_name
from orchestrator.runtime.ranks.rank_actor import FAILURES, RankActor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from orchestrator.core.diagnosis.observation import ProcessSeen, StorageSeen, TerminalSeen
    from orchestrator.core.facts.notes import ReportLeftOut
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.nodes.directories import Site
    from orchestrator.runtime.ranks.rank_events import PollCursor, RankGreeting
    from orchestrator.spec.model import RuntimeEnvSpec
    from orchestrator.train.script.progress_reading import ProgressSnapshot


@dataclass(slots=True)
class Gang:
    """The gang's actors by rank, their first answers, and the relay's record of the attempt ``watching``."""

    number: int
    actors: list[RankActor]
    greetings: list[RankGreeting] = field(default_factory=list)
    watching: int = 0
    watchers: list[asyncio.Task[None]] = field(default_factory=list)
    started: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    unreached: set[int] = field(default_factory=set)
    newest: dict[int, ProgressSnapshot] = field(default_factory=dict)
    processes: dict[int, ProcessSeen] = field(default_factory=dict)
    storage: dict[int, StorageSeen] = field(default_factory=dict)
    terminals: dict[int, TerminalSeen] = field(default_factory=dict)
    cursors: dict[int, PollCursor] = field(default_factory=dict)
    failing: dict[int, tuple[str, str]] = field(default_factory=dict)
    """The present failure of each rank's saves, over all attempts."""
    clocks: defaultdict[int, NodeClock] = field(default_factory=lambda: defaultdict(NodeClock))
    left_out: set[ReportLeftOut] = field(default_factory=set)
    """The parts of reports that were skipped."""

    def begin(self, attempt: int) -> None:
        """Start with an empty record of ``attempt``."""
        self.watching = attempt
        self.started, self.gone, self.newest, self.unreached, self.cursors = {}, set(), {}, set(), {}
        self.processes, self.storage, self.terminals = {}, {}, {}

    def unwatch(self) -> None:
        """Stop recording reports of the attempt."""
        for task in self.watchers:
            task.cancel()


class GangTable:
    """The known gangs. ``call`` runs a blocking function with a deadline."""

    def __init__(self, actors: RayRankActors, call: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._actors = actors
        self._call = call
        self._gangs: dict[JobId, Gang] = {}
        self._calls: dict[JobId, asyncio.Task[Any]] = {}

    def known(self, job_id: JobId) -> Gang | None:
        """Return the gang that was last attached for the job."""
        return self._gangs.get(job_id)

    def current(self, job: Job) -> Gang | None:
        """Return the gang that the job's record names, if it is attached."""
        gang = self._gangs.get(job.id)
        return gang if gang is not None and gang.number == job.gang else None

    def watched(self, job: Job) -> Gang | None:
        """Return the job's gang while the ranks of its current attempt are followed."""
        gang = self.current(job)
        return gang if gang is not None and gang.watching == job.attempt_number else None

    async def attach(self, job: Job, *, create: bool = True) -> Gang:
        """Return the gang's actors: those in memory, those in Ray, or, for a gang never placed, new ones."""
        gang = self.current(job)
        if gang is not None:
            return gang
        self.drop(job.id)
        actors = await self._in_order(job.id, lambda: self._actors.find_or_create(job, create=create))
        gang = self._gangs[job.id] = Gang(number=job.gang, actors=actors)
        return gang

    async def remove(self, job: Job) -> None:
        """Remove everything of the gang from Ray."""
        await self._in_order(job.id, lambda: self._actors.remove(job))

    async def end_unknown(self, jobs: Collection[Job]) -> dict[tuple[str, int], int]:
        """Remove the gangs that none of ``jobs`` holds; return the number of ranks by job and gang."""
        found: dict[tuple[str, int], int] = await self._call(lambda: self._actors.end_unknown(jobs))
        return found

    def drop(self, job_id: JobId) -> None:
        """Forget the job's gang."""
        gang = self._gangs.pop(job_id, None)
        if gang is not None:
            gang.unwatch()

    def forget_all(self) -> dict[JobId, Gang]:
        """Drop every gang, and calls that are never answered: Ray's head has died. Returns the known gangs."""
        self._calls.clear()
        gangs, self._gangs = self._gangs, {}
        for gang in gangs.values():
            gang.unwatch()
        return gangs

    async def close(self) -> None:
        """Stop watching; everything continues to run."""
        tasks: list[asyncio.Task[Any]] = [task for gang in self._gangs.values() for task in gang.watchers]
        tasks += self._calls.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._gangs.clear()

    async def _in_order(self, job_id: JobId, function: Callable[[], Any]) -> Any:
        """Run a blocking call about a job's gang after the previous one, which runs to its end even if its caller gave up."""
        before = self._calls.get(job_id)

        async def run() -> Any:
            if before is not None:
                await asyncio.wait([before])
            return await self._call(function)

        task = asyncio.create_task(run(), name=f"call-{job_id}")
        self._calls[job_id] = task
        task.add_done_callback(lambda done: self._call_ended(job_id, done))
        return await asyncio.shield(task)

    def _call_ended(self, job_id: JobId, task: asyncio.Task[Any]) -> None:
        if self._calls.get(job_id) is task:
            del self._calls[job_id]
        if not task.cancelled():
            task.exception()  # a caller that still waits gets it


PLACEMENT_SECONDS: Final = 1.0
ROOM_SECONDS: Final = 1.0
_ROOM_POLL_SECONDS: Final = 0.005
SHARED_PLACEMENT_SECONDS: Final = 10.0


class RayRankActors:
    """Rank actors of the cluster at ``site``; ``nodes`` has its nodes."""

    def __init__(self, site: Site, ray: RayConnection, nodes: NodeRegistry) -> None:
        self._site = site
        self._ray = ray
        self._nodes = nodes

    def find_or_create(self, job: Job, *, create: bool) -> list[RankActor]:
        """Return the gang's actors by rank; ``create`` creates the missing ones of a gang that was never placed.

        Raises GangLostError: an actor of a placed gang has ended, a node of the gang has left, or there is no gang.
        """
        actors: list[Any] = [None] * job.num_workers
        # Ray is not queried for actors that cannot exist yet.
        if not create or job.seats or job.attempt_number > 1 or _may_exist(job):
            actors = [self._find(job.id, job.gang, rank) for rank in range(job.num_workers)]
        if None not in actors:
            return [_remote(handle) for handle in actors]
        if job.seats:
            raise GangLostError(ActorMissing(rank=actors.index(None)))
        if not create:
            raise GangLostError(StoppedUnplaced())
        if not set(job.nodes) <= set(self._nodes.agents):
            # Ray would wait for the node for ever. On an embedded head's machine locks show when the ranks have ended.
            raise GangLostError(NodeLost(), node_lost=not self._site.embedded)
        return [_remote(handle) for handle in self._create(job, actors)]

    def remove(self, job: Job) -> None:
        """Kill the gang's actors and free its placement group's reservation. Idempotent."""
        self._remove(job.id, job.gang, job.num_workers)

    def end_unknown(self, jobs: Collection[Job]) -> dict[tuple[str, int], int]:
        """Remove the gangs that none of ``jobs`` holds; return the number of ranks by job and gang."""
        from ray.util import list_named_actors

        known = {(job.id, job.gang) for job in jobs if job.gang_open}
        unknown: dict[tuple[str, int], int] = {}
        for name in list_named_actors():
            if (parts := gang_of(name)) is not None and parts[:2] not in known:
                unknown[parts[:2]] = max(unknown.get(parts[:2], 0), parts[2] + 1)
        for (job_id, gang), ranks in unknown.items():
            self._remove(job_id, gang, ranks)
        return unknown

    def _remove(self, job_id: str, gang: int, ranks: int) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        for rank in range(ranks):
            if (actor := self._find(job_id, gang, rank)) is not None:
                ray.kill(actor, no_restart=True)
        if group := _find_group(job_id, gang, self._site.namespace):
            remove_placement_group(group)

    def _find(self, job_id: str, gang: int, rank: int) -> Any | None:
        """Return Ray's handle of an actor; None when there is none."""
        import ray

        try:
            return ray.get_actor(rank_actor_name(job_id, gang, rank), namespace=self._site.namespace)
        except ValueError:
            return None

    def _create(self, job: Job, found: list[Any]) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle, epoch = _bundle(job), self._ray.epoch
        _wait_for_room(job, bundle)
        group = _placement_group(job, bundle, self._site.namespace)
        # Ray queues actors that are requested before their bundles are reserved, and retries them late.
        if not group.wait(timeout_seconds=PLACEMENT_SECONDS if self._site.embedded else SHARED_PLACEMENT_SECONDS):
            self._refuse_on_shared()
        actor_class = _actor_class()
        runtime_env = runtime_env_for_ray(job.spec.runtime_env, self._site.paths.modules(job.id))
        actors = []
        for rank, node_id in enumerate(job.nodes):
            if found[rank] is not None:
                actors.append(found[rank])
                continue
            if self._ray.epoch != epoch:
                raise GangLostError(HeadLost())
            options = actor_class.options(
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
            )
            actors.append(
                options.remote(
                    job_id=job.id,
                    rank=rank,
                    node_dir=str(self._site.node_dir(node_id)),
                    attempt=job.attempt_number,
                    leased=not self._site.embedded,
                )
            )
        return actors

    def _refuse_on_shared(self) -> None:
        """Reject a gang that does not fit an existing cluster any more: the job returns to the queue and may go elsewhere."""
        if not self._site.embedded:
            raise GangLostError(ResourcesTaken())


def _remote(handle: Any) -> RankActor:
    return remote.stub(RankActor, handle, failures=FAILURES)


@functools.cache
def _actor_class() -> Any:
    """Return Ray's class of rank actors: the only one, as Ray keeps a copy of each for the daemon's life."""
    import ray

    return ray.remote(RankActor)


def runtime_env_for_ray(spec: RuntimeEnvSpec, modules: Path) -> dict[str, Any]:
    """Return an actor's ``runtime_env`` option; empty for none. Uploads modules that the cluster lacks; blocking.

    ``modules`` holds the job's own copies of ``py_modules``, by their last names.
    """
    found: dict[str, Any] = {}
    if spec.pip:
        found["pip"] = list(spec.pip)
    if spec.py_modules:
        found |= upload_modules([str(modules / Path(each).name) for each in spec.py_modules], modules)
    return found


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

    if _may_exist(job) and (group := _find_group(job.id, job.gang, namespace)):
        return group
    return placement_group(
        [bundle] * job.num_workers,
        strategy="SPREAD" if len(set(job.nodes)) > 1 else "PACK",
        name=placement_group_name(job.id, job.gang),
        lifetime="detached",
        bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in job.nodes],
    )


def _find_group(job_id: str, gang: int, namespace: str) -> Any | None:
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    found = control_plane.group(placement_group_name(job_id, gang), namespace)
    return PlacementGroup(PlacementGroupID(found.id)) if found else None


def _bundle(job: Job) -> dict[str, float]:
    cpus, gpus, memory = rank_size(job)
    asked = {"CPU": cpus, "GPU": gpus, "memory": float(memory)}
    return {name: amount for name, amount in asked.items() if amount}
