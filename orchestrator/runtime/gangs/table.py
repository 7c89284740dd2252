"""State of the gangs that the daemon has attached, each once; all of it can be found again in Ray."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.runtime.node_clock import NodeClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from orchestrator.core.diagnosis.observation import ProcessSeen, StorageSeen, TerminalSeen
    from orchestrator.core.facts.notes import ReportLeftOut
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.actors import RayRankActors
    from orchestrator.runtime.ranks.rank_actor import RankActor
    from orchestrator.runtime.ranks.rank_events import PollCursor, RankGreeting
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
