"""Gangs on Ray: carries out the effects that jobs' records require.

Decides nothing. Every effect is idempotent: it finds what an earlier daemon or call has created. One effect at a time
per job; a newer one replaces an older one. ``launching.py`` starts ranks, ``ending.py`` ends them, ``relay.py`` reports
their events. ``ray_gangs`` assembles these parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from orchestrator import clock
from orchestrator.core import events as ev
from orchestrator.core.facts.faults import HeadLost
from orchestrator.core.facts.notes import NodeUnreachable, Reachable
from orchestrator.core.lifecycle.advance import CollectFiles, Effect, Ensure, KillRanks, ReleaseGang, StopRanks
from orchestrator.runtime.gangs.ending import Ender
from orchestrator.runtime.gangs.errors import GangLostError, is_away
from orchestrator.runtime.gangs.launching import Launcher
from orchestrator.runtime.gangs.rank_rpc import RPC_SECONDS, GangCalls, noted
from orchestrator.runtime.gangs.relay import EventRelay, gang_lost, recorded_exits
from orchestrator.runtime.gangs.table import GangTable, RayRankActors
from orchestrator.runtime.nodes.directories import gang_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.cluster import Cluster
    from orchestrator.runtime.gangs.job_files import JobFiles
    from orchestrator.runtime.gangs.launching import LaunchSettings
    from orchestrator.runtime.nodes.agent import NodeReport
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths
    from orchestrator.train.script.progress_reading import ProgressSnapshot

RETRY_SECONDS: Final = 0.2
LONGEST_RETRY_SECONDS: Final = 10.0
LONGEST_ABANDONED_SECONDS: Final = 60.0

_ATTEMPT: Final = re.compile(r"attempt-(\d{1,9})")


def _latest_attempt(paths: Paths, job_id: JobId) -> int:
    """Return the highest number of an attempt that has left a directory; each makes some as it starts."""
    numbers = [0]
    for directory in (paths.logs(job_id), paths.exits(job_id)):
        with contextlib.suppress(OSError):
            numbers += [int(found[1]) for path in directory.iterdir() if (found := _ATTEMPT.fullmatch(path.name))]
    return max(numbers)


@dataclass(slots=True)
class _Work:
    """The effect in progress for a job."""

    effect: Effect
    task: asyncio.Task[None]


class Gangs:
    """Gangs on Ray. ``silent`` gives the reason for each node that does not answer; ``post`` takes events for the record.

    ``check_head`` calls ``forget_all`` if Ray's head is ending.
    """

    def __init__(
        self,
        table: GangTable,
        launcher: Launcher,
        ender: Ender,
        files: JobFiles,
        paths: Paths,
        *,
        silent: Callable[[], Mapping[str, str]],
        check_head: Callable[..., Awaitable[None]],
        post: Callable[[Sequence[ev.Event]], None],
        log: FilteringBoundLogger,
    ) -> None:
        self._table = table
        self._launcher = launcher
        self._ender = ender
        self._files = files
        self._paths = paths
        self._silent = silent
        self._check_head = check_head
        self._post = post
        self._log = log
        self._work: dict[JobId, _Work] = {}
        self._abandoned: set[asyncio.Task[None]] = set()

    def apply(self, job: Job, effect: Effect | None) -> None:
        """Start ``effect`` for ``job``; do nothing if it is in progress or done."""
        work = self._work.get(job.id)
        if work is not None and work.effect == effect:
            return
        if work is not None:
            work.task.cancel()
            del self._work[job.id]
        if effect is None:
            return
        task = asyncio.create_task(self._execute(job, effect), name=f"{type(effect).__name__}-{job.id}")
        self._work[job.id] = _Work(effect, task)

    async def survey(self, jobs: Collection[Job]) -> None:
        """Find what the records of live jobs do not know, because the store is an older copy; end and report it.

        Call once, before the first effect: nothing of a restored job may start while this runs.
        """
        gangs = await self._table.end_unknown(jobs)
        for job in jobs:
            attempt = await asyncio.to_thread(_latest_attempt, self._paths, job.id)
            gang = max((number for job_id, number in gangs if job_id == job.id), default=0)
            if attempt >= job.next_attempt or gang >= job.next_gang:
                self._log.warning("store.older_than_its_jobs", job=job.id, attempt=attempt, gang=gang)
                self._post([ev.LaterAttemptsFound(job_id=job.id, at=clock.now(), attempt=attempt, gang=gang)])
        if gangs:
            self._log.warning("gang.unknown_ended", gangs=[gang_name(*gang) for gang in gangs])
            await self._ender.confirm_gone(gangs)

    def abandon(self, job: Job) -> None:
        """End the gang as soon as it can be reached, in the background. After a restart, what is found of ended jobs is ended anyway."""
        task = asyncio.create_task(self._end_abandoned(job), name=f"abandoned-{job.id}")
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def _end_abandoned(self, job: Job) -> None:
        delay = RETRY_SECONDS
        while True:
            try:
                await self._ender.end(job)
            except Exception as error:
                if delay < LONGEST_ABANDONED_SECONDS:  # logged while the delays grow, not for ever
                    why = str(error).partition("\n")[0] or type(error).__name__
                    self._log.warning("gang.abandoned_remains", job=job.id, why=why)
                await asyncio.sleep(delay)
                delay = min(delay * 2, LONGEST_ABANDONED_SECONDS)
            else:
                self._log.info("gang.abandoned_ended", job=job.id)
                return

    def end_collection(self, job_id: JobId) -> bool:
        """Stop copying what the job's gang left, so that the job ends now; False where nothing is being copied."""
        return self._ender.end_collection(job_id)

    def forget_all(self) -> None:
        """Drop all gangs and report each as lost: Ray's head has died, and every gang with it."""
        for work in self._work.values():
            work.task.cancel()  # its actors never answer; the loop applies the effect again
        self._work.clear()
        for job_id, gang in self._table.forget_all().items():
            lost, ranks = GangLostError(HeadLost()), len(gang.actors)
            exits = recorded_exits(self._paths, job_id, gang.watching, ranks, lost) if gang.watching else []
            self._post([*exits, gang_lost(job_id, gang.number, lost)])

    async def close(self) -> None:
        """Stop watching; everything continues to run."""
        tasks = [*(work.task for work in self._work.values()), *self._abandoned]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._table.close()
        await self._files.close()
        self._work.clear()

    async def _execute(self, job: Job, effect: Effect) -> None:
        delay = RETRY_SECONDS
        while True:
            try:
                await self._execute_once(job, effect)
            except GangLostError as error:
                await self._check_head(node_lost=error.node_lost)
                await self._files.bring_ends(job)
                exits = recorded_exits(self._paths, job.id, job.attempt_number, job.num_workers, error)
                self._post([*exits, gang_lost(job.id, job.gang, error)])
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._failed(job, effect, error)
                await self._check_head()
                await asyncio.sleep(delay)
                delay = min(delay * 2, LONGEST_RETRY_SECONDS)
                continue
            return

    async def _execute_once(self, job: Job, effect: Effect) -> None:
        match effect:
            case Ensure():
                await self._launcher.ensure(job)
            case StopRanks():
                await self._ender.stop(job, effect.deadline)
            case KillRanks():
                await self._ender.kill(job)
            case ReleaseGang():
                await self._ender.release(job)
            case CollectFiles():
                await self._ender.collect(job)

    def _failed(self, job: Job, effect: Effect, error: Exception) -> None:
        """Log the failure: one sentence for an actor or node out of reach, a traceback for an unexpected error."""
        if is_away(error):
            why = str(error).partition("\n")[0] or type(error).__name__
            self._log.warning("gang.effect_postponed", job=job.id, effect=type(effect).__name__, why=why)
        else:
            self._log.error("gang.effect_failed", job=job.id, effect=type(effect).__name__, exc_info=error)

    def report_reachability(self, jobs: Iterable[Job]) -> None:
        """Report the jobs that have ranks on nodes that do not answer, and those that no longer have any."""
        silent_nodes = self._silent()
        for job in jobs:
            if not (job.gang_open and job.seats) or job.gang_lost:
                continue
            silent = [rank for rank, node_id in enumerate(job.nodes) if node_id in silent_nodes]
            gang = self._table.known(job.id)
            if silent and not job.degraded:
                unreachable = NodeUnreachable(rank=silent[0], node=job.nodes[silent[0]])
                self._post([noted(job.id, unreachable, degraded=True)])
            elif job.degraded and not silent and not (gang and gang.unreached):
                self._post([noted(job.id, Reachable(), degraded=False)])


def ray_gangs(
    cluster: Cluster,
    settings: LaunchSettings,
    files: JobFiles,
    *,
    secrets_of: Callable[[Job], Mapping[str, str]],
    previous_step: Callable[[JobId], int],
    gpu_evidence: Callable[[Sequence[str]], Awaitable[tuple[Fact, ...]]],
    post: Callable[[Sequence[ev.Event]], None],
    progress: Callable[[JobId, int, int, ProgressSnapshot], None],
    pool: Pool,
    log: FilteringBoundLogger,
) -> tuple[Gangs, GangCalls]:
    """Create the gang runtime for this cluster, and the interface that queries running ranks."""
    ray, nodes, paths = cluster.ray, cluster.nodes, settings.paths

    def reports() -> Mapping[str, NodeReport]:
        return nodes.reports

    call: Callable[[Callable[[], Any]], Awaitable[Any]] = partial(ray.call, seconds=RPC_SECONDS)
    table = GangTable(RayRankActors(cluster.site, ray, nodes), call)
    calls = GangCalls(ray, nodes, table, post=post, log=log)
    relay = EventRelay(
        calls,
        files,
        paths,
        reports=reports,
        gpu_evidence=gpu_evidence,
        check_head=cluster.check_head,
        post=post,
        progress=progress,
        log=log,
        same_clock=cluster.site.embedded,
    )
    launcher = Launcher(
        settings,
        table,
        calls,
        relay,
        files,
        reports=reports,
        secrets_of=secrets_of,
        previous_step=previous_step,
        pool=pool,
        post=post,
    )
    ender = Ender(table, calls, relay, nodes, files, until_connected=ray.until_connected, post=post)
    gangs = Gangs(
        table,
        launcher,
        ender,
        files,
        paths,
        silent=lambda: nodes.silent,
        check_head=cluster.check_head,
        post=post,
        log=log,
    )
    return gangs, calls
