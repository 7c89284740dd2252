"""Answers queries about jobs: live ones from the loop, ended ones from the store."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from orchestrator.analysis import PAGE as PAGE_FILE
from orchestrator.analysis import REPORT
from orchestrator.analysis.trackers import journal
from orchestrator.api.curve_views import TrackerView
from orchestrator.api.errors import AmbiguousReferenceError, BadRequestError, NoSuchJobError, Problem, RefusedError
from orchestrator.api.protocol import PAGE
from orchestrator.api.server.ownership import check_own
from orchestrator.checkpoint.errors import CheckpointError
from orchestrator.daemon.jobs import job_checkpoints as saved
from orchestrator.daemon.jobs.log_stream import LogStream
from orchestrator.daemon.jobs.views import event_view, job_view
from orchestrator.runtime.gangs.launching import checkpoint_dir
from orchestrator.store import errors as store_errors
from orchestrator.store.port import JobFilter as StoreFilter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence

    from orchestrator.api import views as v
    from orchestrator.api.service import Caller, JobFilter, LogQuery
    from orchestrator.core.diagnosis.observation import StallSeen
    from orchestrator.core.estimates import TimeLeft
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.facts.findings import Finding
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.jobs.progress import JobProgress
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.submitting.under_way import UnderWay
    from orchestrator.runtime.pools import Pools
    from orchestrator.spec.paths import Paths
    from orchestrator.store.port import Store

T = TypeVar("T")

REMEMBER_VIEWS: Final = 4096
MOST_CANDIDATES: Final = 5
READ_TOGETHER: Final = 100
"""Records that are read at once for a list."""


class Progress(Protocol):
    """Reports of ranks."""

    def of(self, job_id: JobId) -> JobProgress | None:
        """Return the job's newest progress, if known."""
        ...

    def left(self, job_id: JobId) -> TimeLeft | None:
        """Return the time that a running job will still run."""
        ...

    async def recall(self, jobs: Collection[Job]) -> None:
        """Read what these jobs reported to earlier daemons, so that ``of`` returns it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFacts:
    """Data about live jobs beside their records; nothing by default.

    ``balances`` returns each job's GPU balance, ``stall`` the observation of one that makes no step, ``findings`` a job's open
    findings that were measured since the daemon started, with their newest figures.
    """

    balances: Callable[[], Mapping[JobId, dict[str, Any]]] = dict
    stall: Callable[[JobId], StallSeen | None] = lambda _: None
    findings: Callable[[JobId], tuple[Finding, ...] | None] = lambda _: None


class JobReader:
    """Reads records from the loop and the store, and makes views of them."""

    def __init__(
        self,
        loop: Loop,
        store: Store,
        paths: Paths,
        pools: Pools,
        progress: Progress,
        live: LiveFacts,
        *,
        docs_url: str = "",
    ) -> None:
        self._loop = loop
        self._store = store
        self._paths = paths
        self._pools = pools
        self._progress = progress
        self._live = live
        self._docs_url = docs_url
        self._views: OrderedDict[JobId, tuple[int, tuple[object, ...], v.JobView]] = OrderedDict()

    async def jobs(self, query: JobFilter) -> Sequence[v.JobView]:
        """Return the jobs that match the filter, newest first."""
        before = None if query.before is None else (await self.record(query.before)).submission.sequence
        wanted = StoreFilter(user=query.user, states=query.states, since=query.since, before=before, limit=query.limit)
        views: list[v.JobView] = []
        while len(views) < query.limit:  # in parts: records with large specs are in memory only while they are read
            part = min(READ_TOGETHER, query.limit - len(views))
            found = await self._store.jobs(replace(wanted, before=before, limit=part))
            views += await self.views_of(found)
            if len(found) < part:
                break
            before = found[-1].submission.sequence
        return views

    async def views_of(self, jobs: Sequence[Job]) -> list[v.JobView]:
        """Return the views of these jobs."""
        await self._progress.recall(jobs)
        return [self.view(job) for job in jobs]

    async def job(self, job_id: JobId) -> v.JobView:
        """Return one job. Raises NoSuchJobError."""
        job = await self.record(job_id)
        await self._progress.recall([job])
        view, report = self.view(job), self._report(job)
        trackers = tuple([await self._tracker(job, name) for name in job.spec.trackers])
        return replace(view, report=report, trackers=trackers) if report or trackers else view

    async def _tracker(self, job: Job, name: str) -> TrackerView:
        """Return the view of a tracker, from its journal."""
        kept = await self._pools.records.run(journal.load, journal.path_of(self._paths.job(job.id), name))
        return TrackerView(
            name=name,
            where=kept.where,
            facts=kept.facts,
            points=kept.points,
            waiting=len(kept.pending),
            problem=kept.problem,
            finished=kept.finished,
            updated_at=kept.updated_at or None,
        )

    def _report(self, job: Job) -> str:
        """Return the page of the job's report; empty while there is none, or where the job has closed its directory."""
        page = self._paths.job(job.id) / REPORT / PAGE_FILE
        return str(page) if job.state.is_terminal and os.path.isfile(page) else ""  # noqa: PTH113  # Path.is_file raises

    def view(self, job: Job) -> v.JobView:
        """Return the view, cached for a job without reports until its record or its reason to wait changes."""
        progress = self._progress.of(job.id)
        sources = (
            self._loop.waiting.get(job.id),
            self._live.balances().get(job.id),
            self._live.stall(job.id),
            self._live.findings(job.id) if job.findings and not job.state.is_terminal else None,
        )
        if progress is not None:
            return self._made(job, progress, *sources)
        known = self._views.get(job.id)
        if known is None or known[0] != job.version or known[1] != sources:
            known = self._views[job.id] = (job.version, sources, self._made(job, None, *sources))
            while len(self._views) > REMEMBER_VIEWS:
                self._views.popitem(last=False)
        return known[2]

    def _made(
        self,
        job: Job,
        progress: JobProgress | None,
        waiting: Fact | None,
        balance: dict[str, Any] | None,
        stall: StallSeen | None,
        findings: tuple[Finding, ...] | None,
    ) -> v.JobView:
        return job_view(
            job,
            progress,
            waiting,
            str(self._paths.logs(job.id)),
            balance,
            outputs_dir=str(self._paths.outputs(job.id)) if job.spec.outputs else "",
            stall=stall,
            findings=findings,
            docs_url=self._docs_url,
            left=None if progress is None else self._progress.left(job.id),
        )

    async def resolve(self, ref: str, caller: Caller) -> JobId:
        """Return the id that ``ref`` means. Raises NoSuchJobError, AmbiguousReferenceError."""
        try:
            return (await self._store.find(ref, caller.uid)).job.id
        except store_errors.NamedByOthersError as error:
            raise named_by_others(error) from error
        except store_errors.JobNotFoundError as error:
            raise NoSuchJobError(f"there is no job {ref!r}") from error
        except store_errors.UnreadableRecordError as error:
            raise damaged_error(error) from error
        except store_errors.AmbiguousJobError as error:
            problems = [Problem(message=str(candidate)) for candidate in error.candidates]
            raise AmbiguousReferenceError(f"{ref!r} fits several jobs", problems=problems) from error

    async def record(self, job_id: JobId) -> Job:
        """Return the job's record. Raises NoSuchJobError."""
        live = self._loop.jobs.get(job_id)
        if live is not None:
            return live
        try:
            return await self._store.job(job_id)
        except store_errors.JobNotFoundError as error:
            raise NoSuchJobError(f"there is no job {job_id!r}") from error
        except store_errors.UnreadableRecordError as error:
            raise damaged_error(error) from error

    async def events(
        self, job_id: JobId, after: int, *, limit: int = PAGE, tail: int | None = None
    ) -> Sequence[v.EventView]:
        """Return the job's history."""
        job = await self.record(job_id)
        if tail is not None:  # an event's number is the job's version after it
            after = max(after, job.version - tail)
        try:
            found = await self._store.events(job_id, after=after, limit=limit)
        except store_errors.UnreadableRecordError as error:
            raise damaged_error(error) from error
        return [event_view(stored) for stored in found]

    async def logs(self, job_id: JobId, query: LogQuery) -> AsyncGenerator[Sequence[v.LogLine], None]:
        """Return lines of the job's log. Raises BadRequestError for a rank or an attempt that the job does not have."""
        job = await self.record(job_id)
        query.check(job_id, ranks=max(job.size.most, job.num_workers), attempts=job.attempt_number)
        stream = LogStream(self._paths.logs(job_id), query, lambda: self._ended(job_id), self._pools.logs)
        async for batch in stream.batches():
            yield batch

    async def _ended(self, job_id: JobId) -> tuple[bool, int]:
        job = await self.record(job_id)
        return job.state.is_terminal, job.attempt_number

    async def checkpoints(self, job_id: JobId, *, verify: bool) -> Sequence[v.CheckpointView]:
        """Return the job's checkpoints, newest first."""
        job = await self.record(job_id)
        book = self._progress.of(job_id)
        newest = book.ranks.get(0) if book is not None and book.attempt == job.attempt_number else None
        return await self._look(job, lambda: saved.list_checkpoints(job, self._paths, verify=verify, newest=newest))

    async def checkpoint_path(self, reference: str, caller: Caller, under_way: UnderWay | None = None) -> str:
        """Return the path of the checkpoint that ``JOB`` or ``JOB@STEP`` means, of a job whose state the caller may read.

        The submission ``under_way`` needs that job from now on. Raises BadRequestError, NoSuchJobError, NotPermittedError, RefusedError.
        """
        user, slash, rest = reference.rpartition("/")  # a user's name can have an @
        name, at, step = rest.partition("@")
        ref = f"{user}{slash}{name}"
        if at and not step.isdecimal():
            raise BadRequestError(f"{step or 'nothing'!r} is not a step", hint=f"write {ref}@100, or {ref} alone")
        job = await self.record(await self.resolve(ref, caller))
        check_own(caller, "start from a checkpoint of", job.id, job.submission.user, job.submission.uid)
        if under_way is not None:
            under_way.need([job.id])
        return await self._look(job, lambda: saved.choose(job, self._paths, step))

    async def _look(self, job: Job, look: Callable[[], T]) -> T:
        """Return the result of ``look`` on a job's checkpoints. Raises RefusedError where its storage is unreadable."""
        try:
            return await self._pools.checkpoints.run(look)
        except (OSError, CheckpointError) as error:
            raise RefusedError(
                f"the checkpoints of {job.id} cannot be read: {error}",
                hint=f"look at {checkpoint_dir(job, self._paths)}",
            ) from error


def named_by_others(error: store_errors.NamedByOthersError) -> NoSuchJobError:
    """Return the API's error for a name that only other users' jobs have; its hint names those jobs."""
    shown = " or ".join(f"{name} ({job_id})" for name, job_id in error.candidates[:MOST_CANDIDATES])
    return NoSuchJobError(f"you have no job {error.reference!r}; other users have", hint=f"write {shown}")


def damaged_error(error: store_errors.UnreadableRecordError) -> RefusedError:
    """Return the API's error for a job whose record is damaged."""
    return RefusedError(
        str(error),
        hint="`orch doctor` lists what is damaged; docs/operations/upgrade.md has the way to restore a backup",
    )
