"""Gangs on Ray: carries out what jobs' records want, and reports what happens as events.

Owns placement groups, rank actors and the watchers of their stories. Decides nothing. Every effect is idempotent: it
finds what an earlier daemon, or an earlier call, has made. One effect at a time per job; a newer one replaces an older.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core import events as ev
from orchestrator.core.conformance import repaired
from orchestrator.core.effects import Effect, Ensure, KillRanks, ReleaseGang, StopRanks
from orchestrator.runtime.deadline import within
from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.gangs.actors import find_or_create, remove
from orchestrator.runtime.gangs.errors import GangLostError, as_lost, is_away
from orchestrator.runtime.gangs.event_mapping import exited, in_memory, last_words, resumed, saved, seats_of
from orchestrator.runtime.gangs.launch_spec import Places, checkpoint_dir, rank_plans
from orchestrator.runtime.gangs.patience import Patience
from orchestrator.runtime.gangs.reports import LeftOut, usable
from orchestrator.runtime.gangs.resume_source import newest_checkpoint, watch_settings
from orchestrator.runtime.nodes.directories import page_directory
from orchestrator.runtime.nodes.ray_nodes import end_worker
from orchestrator.runtime.ranks.actor import FENCE_SECONDS, RankGreeting, rendezvous_of
from orchestrator.runtime.ranks.rank_events import PollCursor
from orchestrator.runtime.turns import in_turns
from orchestrator.spec.paths import Paths

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.checkpoint.repository.persister import PersisterStatus
    from orchestrator.core.ids import JobId
    from orchestrator.core.job import Job
    from orchestrator.runtime.cluster.cluster import Cluster
    from orchestrator.runtime.gangs.job_files import JobFiles
    from orchestrator.runtime.pools import Pool
    from orchestrator.runtime.ranks.logs import LogLimits
    from orchestrator.runtime.ranks.rank_events import PollReply, RankEvent
    from orchestrator.train.script.progress_facts import ProgressSnapshot

RPC_SECONDS: Final = 60.0
LATE_ANSWERS: Final = 3
"""Answers to polls in a row that an actor may owe before it is ended; one that is stopped is ended at the first."""
GONE_SECONDS: Final = 60.0
UNPLACED_SECONDS: Final = 5.0
FLUSH_SECONDS: Final = 30.0


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
    unreached: set[int] = field(default_factory=set)
    newest: dict[int, ProgressSnapshot] = field(default_factory=dict)
    cursors: dict[int, PollCursor] = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)


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
        files: JobFiles,
        rank_umask: int | None = None,
        gpu_evidence: Callable[[Sequence[str]], Awaitable[tuple[str, ...]]],
        pool: Pool,
        log: FilteringBoundLogger,
        patience: Patience | None = None,
    ) -> None:
        self._patience = patience or Patience()
        self._pool = pool
        self._gpu_evidence = gpu_evidence
        self._rank_umask = rank_umask
        self.files = files
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
        self._calls: dict[JobId, asyncio.Task[Any]] = {}

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
        for work in self._work.values():
            work.task.cancel()  # it waits for actors that will never answer; the loop orders it again
        self._work.clear()
        self._calls.clear()
        for job_id, gang in list(self._gangs.items()):
            self._drop(job_id, gang)
            words = last_words(self._paths, job_id, gang.watching, len(gang.actors)) if gang.watching else []
            self._lost(job_id, gang.number, GangLostError(None, "Ray's head died"), words)

    async def close(self) -> None:
        """Stop watching; everything runs on."""
        tasks = [w.task for w in self._work.values()]
        tasks += [t for g in self._gangs.values() for t in g.watchers]
        tasks += self._calls.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.files.close()
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
                await self.files.bring_ends(job)
                self._lost(
                    job.id, job.gang, error, last_words(self._paths, job.id, job.attempt_number, job.num_workers)
                )
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._failed_effect(job, effect, error)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 10.0)
                continue
            return

    def _failed_effect(self, job: Job, effect: Effect, error: Exception) -> None:
        """Log it: in a sentence what Ray says of an actor or node that is away, with its traceback what nobody expected."""
        if is_away(error):
            why = str(error).partition("\n")[0] or type(error).__name__
            self._log.warning("gang.effect_postponed", job=job.id, effect=type(effect).__name__, why=why)
        else:
            self._log.error("gang.effect_failed", job=job.id, effect=type(effect).__name__, exc_info=error)

    def _lost(self, job_id: JobId, gang: int, error: GangLostError, last_words: Sequence[ev.Event]) -> None:
        now = time.time()
        # A node that is out of reach may still run its ranks until their lease ends.
        not_before = now + FENCE_SECONDS if error.node_lost else 0.0
        lost = ev.GangLost(
            job_id=job_id, at=now, gang=gang, rank=error.rank, reason=error.reason, not_before=not_before
        )
        self._post([*last_words, lost])

    # -- effects

    async def _ensure(self, job: Job) -> None:
        gang = await self._attach(job)
        if not gang.greetings:
            gang.greetings = await self._hello(job, gang)
            seats = seats_of(gang.greetings, self._cluster.reports)
            if seats != job.seats:
                self._post([ev.GangPlaced(job_id=job.id, at=time.time(), gang=job.gang, seats=seats)])
        else:
            seats = seats_of(gang.greetings, self._cluster.reports)
        attempt = job.attempt_number
        if gang.watching == attempt:
            return
        if any(g.launched < attempt for g in gang.greetings):
            await self._launch(job, gang, seats)
        self._watch(job, gang, attempt)

    async def _launch(self, job: Job, gang: _Gang, seats: tuple[ev.Seat, ...]) -> None:
        await self._bring_files(job)
        attempt = job.attempt_number
        master = await self._prepare(gang, attempt)
        previous = max([self._previous_step(job.id), *(g.highest_step for g in gang.greetings)])
        secrets = self._secrets_of(job)
        resumption = await self._pool.run(newest_checkpoint, job, self._paths, secrets, previous)
        if events := resumed(job.id, resumption, Masker(secrets.values())):
            self._post(events)
        told: dict[str, Any] = {"resume_from": resumption.path, "watch": watch_settings(job, self._paths)}
        nodes = {seat.node_id for seat in seats}
        by_node = {node_id: replace(self._places(job, node_id, secrets, previous), **told) for node_id in nodes}
        plans = rank_plans(job, seats, master, by_node)
        await self._ask(await in_turns(a.launch.remote(p) for a, p in zip(gang.actors, plans, strict=True)))

    async def _prepare(self, gang: _Gang, attempt: int) -> tuple[str, int]:
        """The rendezvous' address and port; nothing of an older attempt runs then. Actors made for the attempt need no call."""
        if (known := rendezvous_of(gang.greetings, attempt)) is not None:
            return known
        address = gang.greetings[0].address
        calls = [a.prepare.remote(attempt, None if rank else address) for rank, a in enumerate(gang.actors)]
        return address, (await self._ask(calls))[0]

    async def _bring_files(self, job: Job) -> None:
        """What a rank needs is on its node, if that does not share the home. Raises GangLostError where that cannot be."""
        apart = self.files.apart(job)
        if not apart:
            return
        try:
            storage = checkpoint_dir(job, self._paths)
            # A URL is the same place from everywhere.
            if "://" not in storage and (blind := await self.files.blind(storage, apart)):
                raise GangLostError(
                    job.nodes.index(blind[0]),
                    f"node {blind[0][:12]} does not see checkpoint.storage_path ({job.spec.checkpoint.storage_path}), so"
                    " what is saved there would be lost with it; mount the directory there, or drain the node",
                )
            await self.files.ship(job)
        except LookupError as error:
            raise GangLostError(None, str(error), node_lost=True) from error

    def _places(self, job: Job, node_id: str, secrets: Mapping[str, str], previous_step: int) -> Places:
        report = self._cluster.reports[node_id]
        own = Paths(home=Path(report.home), socket=self._paths.socket)
        return Places(
            paths=self._paths if report.home_shared else own,
            work_dir=job.work_dir if report.home_shared else str(own.work(job.id)),
            node_dir=Path(report.node_dir),
            page_dir=page_directory(self._cluster.namespace),
            base_env=self._base_env,
            secrets=secrets,
            log_limits=self._log_limits,
            previous_step=previous_step,
            simulated=any(g.simulated for g in report.gpus),
            umask=self._rank_umask,
        )

    async def _stop(self, job: Job, deadline: float) -> None:
        gang = await self._attach_placed(job)
        self._watch(job, gang, job.attempt_number)
        grace = max(0.0, deadline - time.time())
        await self._order(job, [a.stop.remote(job.attempt_number, grace) for a in gang.actors])

    async def _kill(self, job: Job) -> None:
        gang = await self._attach_placed(job)
        self._watch(job, gang, job.attempt_number)
        await self._order(job, [a.kill.remote(job.attempt_number) for a in gang.actors])

    async def _release(self, job: Job) -> None:
        await self._flush(job)
        gang = self._gangs.get(job.id)
        clean = gang is not None and len(gang.gone) == job.num_workers
        if gang is not None:
            self._drop(job.id, gang)
        await self._cluster.until_connected()
        await self._in_order(job.id, lambda: remove(self._cluster, job))
        if not clean:
            await self._confirm_gone(job)
        if told := await self.files.finish(job):
            self._post([ev.JobNoted(job_id=job.id, at=time.time(), code="outputs", message=told)])
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
                self._tell_saved(job.id, status)

    async def _confirm_gone(self, job: Job) -> None:
        """Ask the agent of every node that the gang was on; a dead node's ranks end with their lease."""
        deadline = time.monotonic() + GONE_SECONDS
        by_node: dict[str, list[int]] = {}
        for rank, node_id in enumerate(job.nodes):
            by_node.setdefault(node_id, []).append(rank)
        for node_id, ranks in by_node.items():
            agent = self._cluster.agent_for(node_id)
            if agent is None:
                await self._cluster.until_fenced(node_id)
                continue
            left = await within(RPC_SECONDS, agent.ranks_gone.remote(job.id, ranks, deadline - time.monotonic()))
            if left:
                raise TimeoutError(f"processes of ranks {left} of {job.id} are still on node {node_id}")

    # -- actors

    async def _attach(self, job: Job, *, create: bool = True) -> _Gang:
        """The gang's actors: those in memory, those that are there, or, for a gang never placed, new ones."""
        gang = self._gangs.get(job.id)
        if gang is not None and gang.number == job.gang:
            return gang
        if gang is not None:
            self._drop(job.id, gang)
        actors = await self._in_order(job.id, lambda: find_or_create(self._cluster, job, create=create))
        gang = _Gang(number=job.gang, actors=actors)
        self._gangs[job.id] = gang
        return gang

    async def _attach_placed(self, job: Job) -> _Gang:
        """The gang of a job that is to end: none is made for that, nor waited for. Raises GangLostError."""
        gang = await self._attach(job, create=False)
        if not gang.greetings and not job.seats:
            try:
                gang.greetings = await self._ask([a.hello.remote() for a in gang.actors], seconds=UNPLACED_SECONDS)
            except TimeoutError as error:
                raise GangLostError(None, "it was stopped before its gang was placed") from error
        return gang

    async def _in_order(self, job_id: JobId, function: Callable[[], Any]) -> Any:
        """A blocking call about a job's gang, after the one before: what its caller gave up on still runs to its end."""
        before = self._calls.get(job_id)

        async def run() -> Any:
            if before is not None:
                await asyncio.wait([before])
            return await self._cluster.call(function, seconds=RPC_SECONDS)

        task = asyncio.create_task(run(), name=f"call-{job_id}")
        self._calls[job_id] = task
        task.add_done_callback(lambda done: self._call_ended(job_id, done))
        return await asyncio.shield(task)

    def _call_ended(self, job_id: JobId, task: asyncio.Task[Any]) -> None:
        if self._calls.get(job_id) is task:
            del self._calls[job_id]
        if not task.cancelled():
            task.exception()  # whoever still waits for it is told

    async def _hello(self, job: Job, gang: _Gang) -> list[RankGreeting]:
        limit = job.spec.health.startup_timeout.total_seconds()
        calls = [a.hello.remote() for a in gang.actors]
        # Actors that were there answer at once; new ones may have to be installed first.
        greetings: list[RankGreeting] = await (
            self._order(job, calls) if job.seats else self._ask(calls, seconds=limit)
        )
        return greetings

    async def _order(self, job: Job, calls: Sequence[Any]) -> list[Any]:
        """Tell all ranks' actors something; one that does not answer is ended, and its rank with it.

        Raises TimeoutError then: the next try finds the actor dead, and the gang lost.
        """
        answered: set[int] = set()

        async def answer(rank: int, call: Any) -> Any:
            try:
                found = await call
            except Exception:
                answered.add(rank)
                raise
            answered.add(rank)
            return found

        try:
            return await self._ask(
                [answer(rank, call) for rank, call in enumerate(calls)], seconds=self._patience.order_seconds
            )
        except TimeoutError:
            for rank in set(range(len(calls))) - answered:
                await self._end_actor(job, rank)
            raise

    def _place_of(self, job: Job, rank: int) -> tuple[str, int] | None:
        """The node and the process number of a rank's actor; None while nobody has met it."""
        gang = self._gangs.get(job.id)
        if gang is not None and gang.number == job.gang and rank < len(gang.greetings):
            return gang.greetings[rank].node_id, gang.greetings[rank].pid
        return (job.seats[rank].node_id, job.seats[rank].actor_pid) if rank < len(job.seats) else None

    async def _end_actor(self, job: Job, rank: int) -> None:
        """Have Ray end a rank's actor that does not answer, stopped or not. A node that does not answer is Ray's to judge."""
        place = self._place_of(job, rank)
        gang = self._gangs.get(job.id)
        if place is None or place[0] in self._cluster.silent or gang is None or gang.number != job.gang:
            return
        try:
            await self._cluster.call(end_worker, gang.actors[rank], restart=False)
        except Exception as error:  # whatever Ray says of an actor or a head that is gone: the next try finds out
            self._log.warning("gang.actor_not_ended", job=job.id, rank=rank, why=str(error).partition("\n")[0])
            return
        self._log.warning("gang.actor_ended", job=job.id, rank=rank, pid=place[1])
        self._note(job.id, "actor_ended", f"the actor of rank {rank} did not answer and was ended", degraded=True)

    async def _is_stopped(self, job: Job, rank: int) -> bool:
        """Whether its node's agent sees that a rank's actor is stopped; False when the agent cannot be asked."""
        place = self._place_of(job, rank)
        agent = None if place is None else self._cluster.agent_for(place[0])
        if place is None or agent is None:
            return False
        try:
            return bool(await within(self._patience.order_seconds, agent.is_stopped.remote(place[1])))
        except Exception:  # whatever Ray says of an agent that is dead or out of reach: another is made
            return False

    async def _ask(self, calls: Sequence[Any], seconds: float = RPC_SECONDS) -> list[Any]:
        """The answers of all ranks. Raises GangLostError when an actor is dead."""
        async with asyncio.timeout(seconds):
            results = await asyncio.gather(*calls, return_exceptions=True)
        for rank, result in enumerate(results):
            if isinstance(result, BaseException):
                lost = as_lost(rank, result)
                if lost is not None:
                    raise lost from result
                raise result
        return list(results)

    def actors(self, job: Job) -> tuple[Any, ...]:
        """The actors of the job's current attempt, by rank; none while its ranks are not up."""
        gang = self._gangs.get(job.id)
        up = gang is not None and gang.number == job.gang and gang.watching == job.attempt_number
        return tuple(gang.actors) if gang is not None and up else ()

    # -- watching

    def _watch(self, job: Job, gang: _Gang, attempt: int) -> None:
        self.files.follow(job)
        if gang.watching == attempt:
            return
        for task in gang.watchers:
            task.cancel()
        gang.watching = attempt
        gang.started, gang.gone, gang.newest, gang.unreached = {}, set(), {}, set()
        gang.watchers = [
            asyncio.create_task(self._keep_following(job, gang, attempt, rank), name=f"watch-{job.id}-{rank}")
            for rank in range(job.num_workers)
        ]
        gang.cursors = {}

    def _drop(self, job_id: JobId, gang: _Gang) -> None:
        for task in gang.watchers:
            task.cancel()
        if self._gangs.get(job_id) is gang:
            del self._gangs[job_id]

    async def _keep_following(self, job: Job, gang: _Gang, attempt: int, rank: int) -> None:
        """Follow a rank to its end. What cannot be taken of it is left out and logged; the rest is followed on."""
        while True:
            try:
                await self._follow(job, gang, attempt, rank)
            except Exception:  # a fault of ours, or in what was told: a rank that nothing follows would never end
                self._log.exception("gang.watcher_failed", job=job.id, attempt=attempt, rank=rank)
                gang.gone.discard(rank)  # it may have been set before what failed: the story is told anew
                gang.cursors.pop(rank, None)
                await asyncio.sleep(self._patience.retry_seconds)
            else:
                return

    async def _follow(self, job: Job, gang: _Gang, attempt: int, rank: int) -> None:
        """One rank's story, from its first event to its last; an actor that dies loses the gang."""
        late, held = 0, self._patience.poll_seconds
        while rank not in gang.gone:
            try:
                reply: PollReply = await within(
                    held + self._patience.order_seconds,
                    gang.actors[rank].poll.remote(attempt, gang.cursors.get(rank, PollCursor()), held),
                )
            except asyncio.CancelledError:
                raise
            except Exception as error:
                lost = as_lost(rank, error)
                if lost is not None:
                    await self._actor_lost(job, gang, attempt, lost)
                    return
                if isinstance(error, TimeoutError):
                    late += 1
                    if late >= LATE_ANSWERS or await self._is_stopped(job, rank):
                        await self._end_actor(job, rank)
                if rank not in gang.unreached:
                    gang.unreached.add(rank)
                    self._note(job.id, "unreachable", f"rank {rank} is out of reach: {error}", degraded=True)
                await asyncio.sleep(self._patience.retry_seconds)
                continue
            if rank in gang.unreached:
                gang.unreached.discard(rank)
                self._note(job.id, "reachable", f"rank {rank} is within reach again", degraded=bool(gang.unreached))
            late = 0
            gang.cursors[rank] = reply.cursor
            await self._hear(job, gang, attempt, rank, reply)

    async def _actor_lost(self, job: Job, gang: _Gang, attempt: int, lost: GangLostError) -> None:
        words: Sequence[ev.Event] = ()
        try:
            await self.files.bring_ends(job)
            words = last_words(self._paths, job.id, attempt, job.num_workers)
        except Exception:  # the loss is told, whatever cannot be read of the ends
            self._log.exception("gang.ends_not_read", job=job.id, attempt=attempt)
        self._lost(job.id, gang.number, lost, words)

    async def _hear(self, job: Job, gang: _Gang, attempt: int, rank: int, reply: PollReply) -> None:
        """Take what a rank's host told. What cannot be taken is left out, so that the rest, and the next, still comes."""
        told = partial(gang.left_out.of, job.id, rank, post=self._post, log=self._log)
        if reply.progress is not None:
            with told("its progress"):
                gang.newest[rank] = snapshot = usable(reply.progress)
                self._progress(job.id, attempt, rank, snapshot)
        with told("what became of a snapshot"):
            self._tell_saved(job.id, reply.persisted)
        if reply.events:  # the rank's end is told, whatever its progress page says
            story = await self._with_gpu_evidence(gang, rank, [repaired(event)[0] for event in reply.events])
            self._tell(job, gang, attempt, rank, story)

    async def _with_gpu_evidence(self, gang: _Gang, rank: int, story: Sequence[RankEvent]) -> Sequence[RankEvent]:
        """The story, with what the driver says of the rank's GPUs beside a failure."""
        if all(event.kind != "exited" or event.exit_code == 0 for event in story) or len(gang.greetings) <= rank:
            return story
        try:
            uuids = seats_of(gang.greetings, self._cluster.reports)[rank].gpu_uuids
            found = await self._gpu_evidence(uuids) if uuids else ()
        except Exception:  # the end is told without it
            self._log.exception("gang.no_gpu_evidence", rank=rank)
            return story
        return [replace(e, evidence=(*e.evidence, *found)) if e.kind == "exited" and found else e for e in story]

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
                    facts += in_memory(job.id, attempt, gang.newest.get(0))
                    facts.append(exited(job.id, attempt, rank, event, job.work_dir))
                case _:
                    gang.gone.add(rank)
                    if len(gang.gone) == job.num_workers:
                        facts.append(ev.AttemptGone(job_id=job.id, at=time.time(), attempt=attempt))
        if facts:
            self._post(facts)

    def note_reach(self, jobs: Iterable[Job]) -> None:
        """Say which jobs have ranks on nodes that do not answer, and which have none any more."""
        for job in jobs:
            if not (job.gang_open and job.seats) or job.gang_lost:
                continue
            silent = [rank for rank, node_id in enumerate(job.nodes) if node_id in self._cluster.silent]
            gang = self._gangs.get(job.id)
            if silent and not job.degraded:
                why = self._cluster.silent[job.nodes[silent[0]]]
                self._note(job.id, "unreachable", f"the node of rank {silent[0]}: {why}", degraded=True)
            elif job.degraded and not silent and not (gang and gang.unreached):
                self._note(job.id, "reachable", "every rank's node answers again", degraded=False)

    def _tell_saved(self, job_id: JobId, status: PersisterStatus | None) -> None:
        if facts := saved(job_id, status):
            self._post(facts)

    def _note(self, job_id: JobId, code: str, message: str, *, degraded: bool) -> None:
        self._post([ev.JobNoted(job_id=job_id, at=time.time(), code=code, message=message, degraded=degraded)])
