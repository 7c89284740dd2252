"""Table of the gangs that the daemon has attached: each once, from what exists in Ray."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.runtime.gangs.gang import Gang
from orchestrator.runtime.gangs.reuse.expiry import Expiry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from orchestrator.core.diagnosis.observation import ProcessSeen, StorageSeen, TerminalSeen
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.reuse.origin import Origin


class RankActors(Protocol):
    """Finds, creates and removes the actors of gangs. Calls block."""

    def find_or_create(self, job: Job, *, create: bool) -> list[Any]:
        """Return the gang's actors by rank. Raises GangLostError."""
        ...

    def remove(self, job: Job) -> None:
        """Remove everything of the gang."""
        ...

    def park(self, job: Job, actors: Sequence[Any]) -> bool:
        """Keep the gang's actors for another job; return whether they are kept."""
        ...

    def end_unknown(self, jobs: Collection[Job]) -> dict[Origin, int]:
        """Remove the gangs that none of ``jobs`` holds; return them, and the number of their ranks."""
        ...

    def remove_parked(self) -> bool:
        """Remove gangs that have been kept for long enough; return whether others are kept."""
        ...


class GangTable:
    """The known gangs. ``call`` runs a blocking function with a deadline."""

    def __init__(self, actors: RankActors, call: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._actors = actors
        self._call = call
        self._gangs: dict[JobId, Gang] = {}
        self._calls: dict[JobId, asyncio.Task[Any]] = {}
        self._expiry = Expiry(lambda: call(actors.remove_parked))

    def known(self, job_id: JobId) -> Gang | None:
        """Return the gang that was last attached for the job."""
        return self._gangs.get(job_id)

    def current(self, job: Job) -> Gang | None:
        """Return the gang that the job's record names, if it is attached."""
        gang = self._gangs.get(job.id)
        return gang if gang is not None and gang.number == job.gang else None

    def actors_up(self, job: Job) -> tuple[Any, ...]:
        """Return the actors of the job's current attempt, by rank; none while its ranks are not up."""
        gang = self.current(job)
        return tuple(gang.actors) if gang is not None and gang.watching == job.attempt_number else ()

    def processes(self, job: Job) -> Mapping[int, ProcessSeen]:
        """Return the last known state of the processes of the job's current attempt, by rank."""
        gang = self.current(job)
        return dict(gang.processes) if gang is not None and gang.watching == job.attempt_number else {}

    def storage(self, job: Job) -> Mapping[int, StorageSeen]:
        """Return the last known state of the checkpoint storage of the job's current attempt, by rank."""
        gang = self.current(job)
        return dict(gang.storage) if gang is not None and gang.watching == job.attempt_number else {}

    def terminals(self, job: Job) -> Mapping[int, TerminalSeen]:
        """Return the last known state of the terminals of the job's current attempt, by rank."""
        gang = self.current(job)
        return dict(gang.terminals) if gang is not None and gang.watching == job.attempt_number else {}

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

    async def park(self, job: Job) -> bool:
        """Keep the gang's actors in Ray for another job, for some seconds; return whether they are kept."""
        gang = self.current(job)
        if gang is None or not await self._in_order(job.id, lambda: self._actors.park(job, gang.actors)):
            return False
        self._expiry.begin()
        return True

    async def end_unknown(self, jobs: Collection[Job]) -> dict[Origin, int]:
        """Remove the gangs that none of ``jobs`` holds; return them, and the number of their ranks."""
        found: dict[Origin, int] = await self._call(lambda: self._actors.end_unknown(jobs))
        return found

    def remove_left(self) -> None:
        """Begin to remove the gangs that an earlier daemon parked: they hold their reservations, and no job takes them."""
        self._expiry.begin(0.0)

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
        tasks += [*self._calls.values(), *([self._expiry.task] if self._expiry.task else [])]
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
