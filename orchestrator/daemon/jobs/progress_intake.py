"""Takes ranks' reports and passes them to their followers; recalls reports to earlier daemons."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.estimates import TimeLeft
    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.changes import Changes
    from orchestrator.daemon.jobs.progress import JobProgress, ProgressTable
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths
    from orchestrator.train.script.progress import ProgressSnapshot

REMEMBER_ENDED: Final = 1000


class Estimates(Protocol):
    """Time left of jobs."""

    def left(self, job_id: JobId) -> TimeLeft | None:
        """Return the time that a running job will still run."""
        ...

    def resume(self, jobs: Sequence[tuple[JobId, Path]]) -> None:
        """Read what live jobs reported to an earlier daemon. Blocks."""
        ...


class ProgressIntake:
    """Takes reports. ``jobs`` returns the live jobs; ``post`` takes the events that follow from a report.

    ``followers`` are called with every report of a live job: with its job, attempt and rank. ``remember`` ended jobs
    are kept in memory. What requests ask about earlier reports is read in ``pool``.
    """

    def __init__(
        self,
        book: ProgressTable,
        paths: Paths,
        *,
        jobs: Callable[[], Mapping[JobId, Job]],
        followers: Sequence[Callable[[Job, int, int, ProgressSnapshot], None]],
        post: Callable[[Sequence[Event]], None],
        estimates: Estimates,
        changes: Changes,
        pool: Pool,
        log: FilteringBoundLogger,
        remember: int = REMEMBER_ENDED,
    ) -> None:
        self._book = book
        self._paths = paths
        self._jobs = jobs
        self._followers = followers
        self._post = post
        self._estimates = estimates
        self._changes = changes
        self._pool = pool
        self._log = log
        self._remember = remember
        self._ended: deque[JobId] = deque()

    def take(self, job_id: JobId, attempt: int, rank: int, snapshot: ProgressSnapshot) -> None:
        """Take a rank's newest report."""
        job = self._jobs().get(job_id)
        if job is None:
            return
        for follow in self._followers:
            follow(job, attempt, rank, snapshot)
        events = self._book.take(job, attempt, rank, snapshot, self._paths.metrics(job_id))
        if any(getattr(event, "code", "") == "unusable_report" for event in events):
            self._log.warning("rank.unusable_report", job=job_id, rank=rank, fields=snapshot.unusable)
        self._changes.touch(job_id)
        if events:
            self._post(events)

    def of(self, job_id: JobId) -> JobProgress | None:
        """Return the job's newest progress, as far as it was reported or recalled."""
        return self._book.of(job_id)

    def left(self, job_id: JobId) -> TimeLeft | None:
        """Return the time that a running job will still run; None where its reports do not show it."""
        return self._estimates.left(job_id)

    async def resume(self) -> None:
        """Read what live jobs reported to an earlier daemon: their next reports continue from it."""
        begun = [(j, self._paths.metrics(j.id)) for j in self._jobs().values() if j.attempts]
        await asyncio.to_thread(self._book.resume, begun)
        await asyncio.to_thread(self._estimates.resume, [(job.id, path) for job, path in begun])

    async def recall(self, jobs: Collection[Job]) -> None:
        """Read into the book what these jobs reported to earlier daemons."""
        unknown = {j.id: self._paths.metrics(j.id) for j in jobs if not self._book.knows(j.id)}
        if unknown:
            await self._pool.run(self._book.recall, unknown)

    def ended(self, job_id: JobId) -> None:
        """Handle a job's end: write its newest report, and drop the job that ended longest ago."""
        self._book.settle(job_id, self._paths.metrics(job_id))
        self._ended.append(job_id)
        while len(self._ended) > self._remember:
            self._book.forget(self._ended.popleft())

    def settle(self) -> None:
        """Write every job's newest report, unless that was done."""
        for job_id in self._book.all():
            self._book.settle(job_id, self._paths.metrics(job_id))
