"""Gangs on Ray: carries out what jobs' records want, and reports what happens as events.

Owns placement groups, rank actors and the watchers of their stories. Decides nothing. Every effect is idempotent: it
finds what an earlier daemon, or an earlier call, has made. One effect at a time per job; a newer one replaces an older.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator.checkpoint import layout
from orchestrator.core import events as ev
from orchestrator.core.effects import Effect, Ensure, KillRanks, ReleaseGang, StopRanks
from orchestrator.runtime.forkclient import read_exit_record
from orchestrator.runtime.names import placement_group_name, rank_actor_name
from orchestrator.runtime.node_dir import page_directory
from orchestrator.runtime.plan import Places, rank_plan
from orchestrator.runtime.rank_actor import LEASE_SECONDS, RankGreeting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.checkpoint.persister import PersisterStatus
    from orchestrator.core.ids import JobId
    from orchestrator.core.job import Job
    from orchestrator.runtime.cluster import Cluster
    from orchestrator.runtime.logs import LogLimits
    from orchestrator.runtime.rank_host import PollReply, RankEvent
    from orchestrator.spec.paths import Paths
    from orchestrator.train.progress import ProgressSnapshot

POLL_SECONDS: Final = 30.0
RPC_SECONDS: Final = 60.0
GONE_SECONDS: Final = 60.0
PLACEMENT_SECONDS: Final = 1.0
FLUSH_SECONDS: Final = 30.0
_UNREACHABLE_RETRY_SECONDS: Final = 0.5


class GangLostError(Exception):
    """An actor of the gang is gone for good; the gang must be released and the job placed anew."""

    def __init__(self, rank: int | None, reason: str, *, node_lost: bool = False) -> None:
        self.rank, self.reason, self.node_lost = rank, reason, node_lost
        super().__init__(reason)


@dataclass(slots=True)
class _Gang:
    """What is known in memory of a job's gang; all of it can be found again."""

    number: int
    actors: list[Any]
    greetings: list[RankGreeting] = field(default_factory=list)
    watching: int = 0
    watchers: list[asyncio.Task[None]] = field(default_factory=list)
    started: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    newest: dict[int, ProgressSnapshot] = field(default_factory=dict)


@dataclass(slots=True)
class _Work:
    """The effect under way for a job."""

    effect: Effect
    task: asyncio.Task[None]


class Gangs:
    """See the module. ``post`` takes events for the record; ``progress`` the newest snapshot of a rank."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        paths: Paths,
        base_env: Mapping[str, str],
        secrets_of: Callable[[Job], Mapping[str, str]],
        log_limits: LogLimits,
        post: Callable[[Sequence[ev.Event]], None],
        progress: Callable[[JobId, int, int, ProgressSnapshot], None],
        previous_step: Callable[[JobId], int],
        log: FilteringBoundLogger,
    ) -> None:
        self._cluster = cluster
        self._paths = paths
        self._base_env = base_env
        self._secrets_of = secrets_of
        self._log_limits = log_limits
        self._post = post
        self._progress = progress
        self._previous_step = previous_step
        self._log = log
        self._gangs: dict[JobId, _Gang] = {}
        self._work: dict[JobId, _Work] = {}

    def apply(self, job: Job, effect: Effect | None) -> None:
        """Have ``effect`` done for ``job``; asking for what is under way, or for nothing new, does nothing."""
        work = self._work.get(job.id)
        if work is not None and work.effect == effect:
            return
        if work is not None:
            work.task.cancel()
            del self._work[job.id]
        if effect is None:
            return
        task = asyncio.create_task(self._carry_out(job, effect), name=f"{type(effect).__name__}-{job.id}")
        self._work[job.id] = _Work(effect, task)

    def forget_all(self) -> None:
        """Ray's head is gone and every gang with it: drop what was known, report every gang as lost."""
        for job_id, gang in list(self._gangs.items()):
            self._drop(job_id, gang)
            self._lost(job_id, gang.number, GangLostError(None, "Ray's head died"))

    async def close(self) -> None:
        """Stop watching; everything runs on."""
        tasks = [w.task for w in self._work.values()]
        tasks += [t for g in self._gangs.values() for t in g.watchers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._work.clear()
        self._gangs.clear()

    async def _carry_out(self, job: Job, effect: Effect) -> None:
        delay = 0.2
        while True:
            try:
                match effect:
                    case Ensure():
                        await self._ensure(job)
                    case StopRanks():
                        await self._stop(job, effect.deadline)
                    case KillRanks():
                        await self._kill(job)
                    case ReleaseGang():
                        await self._release(job)
            except GangLostError as error:
                self._lost(job.id, job.gang, error)
            except asyncio.CancelledError:
                raise
            except Exception:
                self._log.exception("gang.effect_failed", job=job.id, effect=type(effect).__name__)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 10.0)
                continue
            return

    def _lost(self, job_id: JobId, gang: int, error: GangLostError) -> None:
        now = time.time()
        # A node that is out of reach may still run its ranks until their lease ends.
        not_before = now + LEASE_SECONDS if error.node_lost else 0.0
        self._post(
            [ev.GangLost(job_id=job_id, at=now, gang=gang, rank=error.rank, reason=error.reason, not_before=not_before)]
        )

    # -- effects

    async def _ensure(self, job: Job) -> None:
        gang = await self._attach(job)
        if not gang.greetings:
            gang.greetings = await self._hello(job, gang)
            seats = self._seats(gang.greetings)
            if seats != job.seats:
                self._post([ev.GangPlaced(job_id=job.id, at=time.time(), gang=job.gang, seats=seats)])
        else:
            seats = self._seats(gang.greetings)
        attempt = job.attempt_number
        if gang.watching == attempt:
            return
        if any(g.launched < attempt for g in gang.greetings):
            await self._launch(job, gang, seats)
        self._watch(job, gang, attempt)

    async def _launch(self, job: Job, gang: _Gang, seats: tuple[ev.Seat, ...]) -> None:
        attempt = job.attempt_number
        master = gang.greetings[0].address
        ports = await self._ask(
            [a.prepare.remote(attempt, master if r == 0 else None) for r, a in enumerate(gang.actors)]
        )
        previous = max([self._previous_step(job.id), *(g.highest_step for g in gang.greetings)])
        secrets = self._secrets_of(job)
        plans = [
            rank_plan(job, seats, seat.rank, (master, ports[0]), self._places(seat, secrets, previous))
            for seat in seats
        ]
        await self._ask([a.launch.remote(p) for a, p in zip(gang.actors, plans, strict=True)])

    def _places(self, seat: ev.Seat, secrets: Mapping[str, str], previous_step: int) -> Places:
        report = self._cluster.reports[seat.node_id]
        return Places(
            paths=self._paths,
            node_dir=Path(report.node_dir),
            page_dir=page_directory(self._cluster.namespace),
            base_env=self._base_env,
            secrets=secrets,
            log_limits=self._log_limits,
            previous_step=previous_step,
            simulated=any(g.simulated for g in report.gpus),
        )

    async def _stop(self, job: Job, deadline: float) -> None:
        gang = await self._attach(job)
        self._watch(job, gang, job.attempt_number)
        grace = max(0.0, deadline - time.time())
        await self._ask([a.stop.remote(job.attempt_number, grace) for a in gang.actors])

    async def _kill(self, job: Job) -> None:
        gang = await self._attach(job)
        self._watch(job, gang, job.attempt_number)
        await self._ask([a.kill.remote(job.attempt_number) for a in gang.actors])

    async def _release(self, job: Job) -> None:
        await self._flush(job)
        gang = self._gangs.get(job.id)
        clean = gang is not None and len(gang.gone) == job.num_workers
        if gang is not None:
            self._drop(job.id, gang)
        await self._cluster.until_connected()
        await self._cluster.call(self._remove, job, seconds=RPC_SECONDS)
        if not clean:
            await self._confirm_gone(job)
        self._post([ev.GangReleased(job_id=job.id, at=time.time(), gang=job.gang)])

    async def _flush(self, job: Job) -> None:
        """Have the newest snapshot brought to storage before the actors that do it go away."""
        if job.gang_lost or not job.seats:
            return
        try:
            gang = await self._attach(job)
            async with asyncio.timeout(FLUSH_SECONDS + RPC_SECONDS):
                statuses = await asyncio.gather(
                    *(a.flush.remote(FLUSH_SECONDS) for a in gang.actors), return_exceptions=True
                )
        except (GangLostError, TimeoutError):
            return
        for status in statuses:
            if not isinstance(status, BaseException):
                self._persisted(job.id, status)

    def _persisted(self, job_id: JobId, status: PersisterStatus | None) -> None:
        """A snapshot has become a checkpoint on storage, or could not."""
        if status is None:
            return
        facts: list[ev.Event] = []
        # The rank whose part came last names the checkpoint; the others still name the one before.
        if status.step is not None and status.attempt is not None and _is_of(status.path, status.step):
            at = status.at or time.time()
            facts.append(
                ev.CheckpointSaved(job_id=job_id, at=at, attempt=status.attempt, step=status.step, path=status.path)
            )
        if status.failure:
            facts.append(ev.JobNoted(job_id=job_id, at=time.time(), code="save_failed", message=status.failure))
        if facts:
            self._post(facts)

    async def _confirm_gone(self, job: Job) -> None:
        """Ask the agent of every node that the gang was on; a dead node's ranks end with their lease."""
        deadline = time.monotonic() + GONE_SECONDS
        by_node: dict[str, list[int]] = {}
        for rank, node_id in enumerate(job.nodes):
            by_node.setdefault(node_id, []).append(rank)
        for node_id, ranks in by_node.items():
            agent = self._cluster.agent_for(node_id)
            if agent is None:
                continue
            left = await asyncio.wait_for(
                agent.ranks_gone.remote(job.id, ranks, deadline - time.monotonic()), RPC_SECONDS
            )
            if left:
                raise TimeoutError(f"processes of ranks {left} of {job.id} are still on node {node_id}")

    # -- actors

    async def _attach(self, job: Job) -> _Gang:
        """The gang's actors: those in memory, those that are there, or, for a gang never placed, new ones."""
        gang = self._gangs.get(job.id)
        if gang is not None and gang.number == job.gang:
            return gang
        if gang is not None:
            self._drop(job.id, gang)
        actors = await self._cluster.call(self._find_or_create, job, seconds=RPC_SECONDS)
        gang = _Gang(number=job.gang, actors=actors)
        self._gangs[job.id] = gang
        return gang

    def _find_or_create(self, job: Job) -> list[Any]:
        import ray

        found: list[Any] = []
        placed = bool(job.seats)
        for rank in range(job.num_workers):
            try:
                found.append(
                    ray.get_actor(rank_actor_name(job.id, job.gang, rank), namespace=self._cluster.namespace)
                    if placed or job.attempt_number > 1 or self._may_exist(job)
                    else None
                )
            except ValueError:
                found.append(None)
        if placed and None in found:
            rank = found.index(None)
            raise GangLostError(rank, f"the actor of rank {rank} is gone")
        return found if None not in found else self._create(job, found)

    def _may_exist(self, job: Job) -> bool:
        """An earlier daemon may have made the actors and died before it could say so."""
        return time.time() - job.state_since > 1.0

    def _create(self, job: Job, found: list[Any]) -> list[Any]:
        import ray
        from ray.util.placement_group import get_placement_group, placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from orchestrator.runtime.rank_actor import RankActor

        name = placement_group_name(job.id, job.gang)
        bundle = _bundle(job)
        group = None
        if self._may_exist(job):
            with contextlib.suppress(ValueError):
                group = get_placement_group(name)
        if group is None:
            group = placement_group(
                [bundle] * job.num_workers,
                strategy="SPREAD" if len(set(job.nodes)) > 1 else "PACK",
                name=name,
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in job.nodes],
            )
        # Actors that are asked for before their bundles are reserved are queued, and looked at again only later.
        group.wait(timeout_seconds=PLACEMENT_SECONDS)
        actor_class = ray.remote(RankActor)
        actors = []
        for rank, node_id in enumerate(job.nodes):
            if found[rank] is not None:
                actors.append(found[rank])
                continue
            actors.append(
                actor_class.options(
                    name=rank_actor_name(job.id, job.gang, rank),
                    namespace=self._cluster.namespace,
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0),
                    memory=bundle.get("memory"),
                    max_restarts=0,
                    max_concurrency=64,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=rank
                    ),
                ).remote(
                    job_id=job.id,
                    gang=job.gang,
                    rank=rank,
                    node_dir=str(self._cluster.node_dir(node_id)),
                )
            )
        return actors

    def _remove(self, job: Job) -> None:
        import ray
        from ray.util.placement_group import get_placement_group, remove_placement_group

        for rank in range(job.num_workers):
            with contextlib.suppress(ValueError):
                actor = ray.get_actor(rank_actor_name(job.id, job.gang, rank), namespace=self._cluster.namespace)
                ray.kill(actor, no_restart=True)
        with contextlib.suppress(ValueError):
            remove_placement_group(get_placement_group(placement_group_name(job.id, job.gang)))

    async def _hello(self, job: Job, gang: _Gang) -> list[RankGreeting]:
        limit = job.spec.health.startup_timeout.total_seconds()
        greetings: list[RankGreeting] = await self._ask([a.hello.remote() for a in gang.actors], seconds=limit)
        return greetings

    def _seats(self, greetings: Sequence[RankGreeting]) -> tuple[ev.Seat, ...]:
        seats = []
        for rank, greeting in enumerate(greetings):
            report = self._cluster.reports.get(greeting.node_id)
            uuids = {str(g.index): g.uuid for g in report.gpus} if report else {}
            seats.append(
                ev.Seat(
                    rank=rank,
                    node_id=greeting.node_id,
                    node_name=report.hostname if report else greeting.address,
                    gpu_ids=greeting.gpu_ids,
                    gpu_uuids=tuple(uuids.get(i, i) for i in greeting.gpu_ids),
                    actor_pid=greeting.pid,
                )
            )
        return tuple(seats)

    async def _ask(self, calls: Sequence[Any], seconds: float = RPC_SECONDS) -> list[Any]:
        """The answers of all ranks. Raises GangLostError when an actor is dead."""
        async with asyncio.timeout(seconds):
            results = await asyncio.gather(*calls, return_exceptions=True)
        for rank, result in enumerate(results):
            if isinstance(result, BaseException):
                lost = _as_lost(rank, result)
                if lost is not None:
                    raise lost from result
                raise result
        return list(results)

    # -- watching

    def _watch(self, job: Job, gang: _Gang, attempt: int) -> None:
        if gang.watching == attempt:
            return
        for task in gang.watchers:
            task.cancel()
        gang.watching = attempt
        gang.started, gang.gone, gang.newest = {}, set(), {}
        gang.watchers = [
            asyncio.create_task(self._follow(job, gang, attempt, rank), name=f"watch-{job.id}-{rank}")
            for rank in range(job.num_workers)
        ]

    def _drop(self, job_id: JobId, gang: _Gang) -> None:
        for task in gang.watchers:
            task.cancel()
        if self._gangs.get(job_id) is gang:
            del self._gangs[job_id]

    async def _follow(self, job: Job, gang: _Gang, attempt: int, rank: int) -> None:
        """One rank's story, from its first event to its last; an actor that dies loses the gang."""
        after, degraded = 0, False
        while rank not in gang.gone:
            try:
                reply: PollReply = await asyncio.wait_for(
                    gang.actors[rank].poll.remote(attempt, after, POLL_SECONDS), POLL_SECONDS + RPC_SECONDS
                )
            except asyncio.CancelledError:
                raise
            except Exception as error:
                lost = _as_lost(rank, error)
                if lost is not None:
                    self._lost_while_followed(job, gang, attempt, rank, lost)
                    return
                if not degraded:
                    degraded = True
                    self._note(job.id, "unreachable", f"rank {rank} is out of reach: {error}", degraded=True)
                await asyncio.sleep(_UNREACHABLE_RETRY_SECONDS)
                continue
            if degraded:
                degraded = False
                self._note(job.id, "reachable", f"rank {rank} is within reach again", degraded=False)
            if reply.progress is not None:
                gang.newest[rank] = reply.progress
                self._progress(job.id, attempt, rank, reply.progress)
            if reply.persisted is not None:
                self._persisted(job.id, reply.persisted)
            if reply.events:
                after = reply.events[-1].number
                self._tell(job, gang, attempt, rank, reply.events)

    def _tell(self, job: Job, gang: _Gang, attempt: int, rank: int, story: Sequence[RankEvent]) -> None:
        facts: list[ev.Event] = []
        for event in story:
            match event.kind:
                case "started":
                    gang.started[rank] = event.pid
                    if len(gang.started) == job.num_workers:
                        pids = tuple(gang.started[r] for r in range(job.num_workers))
                        facts.append(ev.AttemptRunning(job_id=job.id, at=event.at, attempt=attempt, pids=pids))
                case "exited":
                    facts += self._in_memory(job.id, gang, attempt)
                    facts.append(_exit(job.id, attempt, rank, event))
                case _:
                    gang.gone.add(rank)
                    if len(gang.gone) == job.num_workers:
                        facts.append(ev.AttemptGone(job_id=job.id, at=time.time(), attempt=attempt))
        if facts:
            self._post(facts)

    def _in_memory(self, job_id: JobId, gang: _Gang, attempt: int) -> list[ev.Event]:
        """The snapshot that the dead ranks leave in shared memory: where the next attempt begins. Its path is empty."""
        newest = gang.newest.get(0)
        if newest is None or newest.snapshot_step is None:
            return []
        at = newest.snapshot_at or time.time()
        return [ev.CheckpointSaved(job_id=job_id, at=at, attempt=attempt, step=newest.snapshot_step, path="")]

    def _lost_while_followed(self, job: Job, gang: _Gang, attempt: int, rank: int, lost: GangLostError) -> None:
        """The actor is dead; its process may have ended by itself before, and its keeper's record says so."""
        record = read_exit_record(self._paths.exit_record(job.id, attempt, rank))
        if record is not None and record.cause is None and record.exit_code is not None:
            self._post(
                [
                    ev.RankExited(
                        job_id=job.id,
                        at=record.ended_at,
                        attempt=attempt,
                        rank=rank,
                        exit_code=record.exit_code,
                        signal=record.signal,
                        error_type=record.error.type if record.error else "",
                        error_message=record.error.message if record.error else "",
                        error_at=record.error.at if record.error else None,
                    )
                ]
            )
        self._lost(job.id, gang.number, lost)

    def _note(self, job_id: JobId, code: str, message: str, *, degraded: bool) -> None:
        self._post([ev.JobNoted(job_id=job_id, at=time.time(), code=code, message=message, degraded=degraded)])


def _is_of(path: str, step: int) -> bool:
    found = layout.parse_name(path.rpartition("/")[2])
    return found is not None and found.step == step


def _bundle(job: Job) -> dict[str, float]:
    worker = job.spec.resources.resources_per_worker
    bundle: dict[str, float] = {"CPU": max(worker.cpu, 0.001)}
    if worker.gpu:
        bundle["GPU"] = worker.gpu
    if worker.memory_bytes:
        bundle["memory"] = float(worker.memory_bytes)
    return bundle


def _exit(job_id: JobId, attempt: int, rank: int, event: RankEvent) -> ev.RankExited:
    return ev.RankExited(
        job_id=job_id,
        at=event.at,
        attempt=attempt,
        rank=rank,
        exit_code=event.exit_code,
        signal=event.signal,
        error_type=event.error_type,
        error_message=event.error_message,
        error_at=event.error_at,
        log_tail=event.log_tail,
    )


def _as_lost(rank: int, error: BaseException) -> GangLostError | None:
    """The loss that an error of Ray means; None when it may pass."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError

    if isinstance(error, ActorUnavailableError):
        return None
    if isinstance(error, ActorDiedError):
        text = str(error)
        node_lost = "node" in text.lower() and "died" in text.lower() and "worker" not in text.lower()
        what = "its node died" if node_lost else "its actor died"
        return GangLostError(rank, f"rank {rank}: {what}", node_lost=node_lost)
    if isinstance(error, ActorUnschedulableError):
        return GangLostError(rank, f"rank {rank} could not be placed: {error}")
    return None
