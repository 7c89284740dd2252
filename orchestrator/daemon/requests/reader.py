"""Answers queries about jobs: live ones from the loop, ended ones from the store.

Also their logs as a stream (the existing lines, then, for a follower, new lines until the job has ended), and their checkpoints: lists and verifies
them, and chooses one as another job's start; decides no retention.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from orchestrator.analysis import PAGE as PAGE_FILE
from orchestrator.analysis import REPORT
from orchestrator.analysis.trackers import journal
from orchestrator.api import views as v
from orchestrator.api.curve_views import TrackerView
from orchestrator.api.errors import AmbiguousReferenceError, BadRequestError, NoSuchJobError, Problem, RefusedError
from orchestrator.api.protocol import PAGE
from orchestrator.api.server.ownership import check_own
from orchestrator.api.views import LogLine
from orchestrator.checkpoint.errors import CheckpointError
from orchestrator.checkpoint.external.external_checkpoints import ExternalCheckpoints
from orchestrator.checkpoint.repository.repository import CheckpointRepository
from orchestrator.checkpoint.storage.directory import CheckpointStatus, Retention, best_by_score
from orchestrator.daemon.jobs.tidying import read_secrets
from orchestrator.daemon.jobs.views import event_view, job_view
from orchestrator.runtime.gangs.launching import checkpoint_dir, store_environ, watch_settings
from orchestrator.runtime.ranks.logs import LogReader, batched
from orchestrator.store import errors as store_errors
from orchestrator.store.records import JobFilter as StoreFilter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from orchestrator.api.service import Caller, JobFilter, LogQuery
    from orchestrator.checkpoint.storage.directory import CheckpointInfo
    from orchestrator.core.diagnosis.observation import StallSeen
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.facts.findings import Finding
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.jobs.progress import JobProgress, ProgressIntake
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.submitting.under_way import UnderWay
    from orchestrator.runtime.pools import Pool, Pools
    from orchestrator.runtime.ranks.logs import LogEntry
    from orchestrator.spec.paths import Paths
    from orchestrator.store.store import Store
    from orchestrator.train.script.progress_reading import ProgressSnapshot


def list_checkpoints(
    job: Job, paths: Paths, *, verify: bool, newest: ProgressSnapshot | None = None
) -> list[v.CheckpointView]:
    """Return the job's checkpoints, newest first; ``verify`` reads every byte.

    ``newest`` is rank 0's last report: its newest snapshot may be in memory only.
    """
    infos = [check(info) if verify else info for info, check in _entries(job, paths)]
    spec = job.spec.checkpoint
    retention = Retention(score_attribute=spec.score_attribute, score_order=spec.score_order or "min")
    best = best_by_score(infos, retention)
    views = [_view(info, job, verified=verify, is_best=best is not None and best.name == info.name) for info in infos]
    in_memory = _in_memory(job, newest)
    if in_memory is None or any(
        (i.attempt, i.step) == (in_memory.attempt, in_memory.step) for i in infos if i.is_complete
    ):
        return views
    return [in_memory, *views]


def _in_memory(job: Job, newest: ProgressSnapshot | None) -> v.CheckpointView | None:
    """Return the newest snapshot of a live job's ranks that is in memory only; None where there is none."""
    if not job.gang_open or job.gang_lost:
        return None
    if newest is not None and newest.snapshot_step is not None:
        step, at = newest.snapshot_step, newest.snapshot_at
    elif (
        job.checkpoints.at is not None
        and job.checkpoints.at != job.checkpoints.durable_at
        and job.checkpoints.step > job.checkpoints.durable_step
    ):
        step, at = job.checkpoints.step, job.checkpoints.at
    else:
        return None
    return v.CheckpointView(step=step, at=at or 0.0, path="", attempt=job.attempt_number, location="memory")


def choose(job: Job, paths: Paths, step: str) -> str:
    """Return path or URL of the newest valid checkpoint, or of the newest valid one of ``step`` (empty: any step).

    Reads and verifies only candidates. Raises BadRequestError with the existing steps.
    """
    entries = _entries(job, paths)
    infos = [info for info, _ in entries]
    why = ""
    for info, check in entries:
        if step and str(info.step) != step:
            continue
        checked = check(info)
        if checked.status is CheckpointStatus.COMPLETE:
            return checked.path
        why = why or f": {checked.why}"
    steps = ", ".join(dict.fromkeys(str(i.step) for i in infos if i.status is CheckpointStatus.COMPLETE)) or "none"
    which = f"good checkpoint of step {step}" if step else "good checkpoint"
    raise BadRequestError(
        f"{job.id} has no {which} on storage{why}",
        hint=f"there are: {steps}; `orch checkpoints {job.id} --verify` looks at all of them",
    )


def _entries(job: Job, paths: Paths) -> list[tuple[CheckpointInfo, Callable[[CheckpointInfo], CheckpointInfo]]]:
    """Return all of the job's checkpoints, newest first, each with the object that verifies it."""
    environ = store_environ(job, read_secrets(paths, job.id))
    store = CheckpointRepository(checkpoint_dir(job, paths), attempt=max(job.attempt_number, 1), environ=environ)
    found: list[tuple[CheckpointInfo, Callable[[CheckpointInfo], CheckpointInfo]]]
    found = [(info, store.verify) for info in store.list()]
    settings = watch_settings(job, paths)
    if settings is not None:
        files = ExternalCheckpoints(settings)
        found = [(info, files.verify) for info in files.infos()] + found
    return found


def _view(info: CheckpointInfo, job: Job, *, verified: bool, is_best: bool) -> v.CheckpointView:
    status = info.status
    attribute = job.spec.checkpoint.score_attribute
    return v.CheckpointView(
        step=info.step,
        at=info.created_at or 0.0,
        path=info.path,
        attempt=info.attempt,
        location="incomplete" if status is CheckpointStatus.INCOMPLETE else "disk",
        size_bytes=info.bytes if status is CheckpointStatus.COMPLETE else None,
        metrics=dict(info.metrics),
        score=None if attribute is None else info.metrics.get(attribute),
        is_best=is_best,
        valid={CheckpointStatus.COMPLETE: True if verified else None, CheckpointStatus.BROKEN: False}.get(status),
        problem=info.why if status is CheckpointStatus.BROKEN else "",
    )


FOLLOW_SECONDS = 0.1  # polling interval of a follower's files
BATCH_LINES = 1000


class LogStream:
    """Stream of a job's log. ``ended`` returns whether it has ended, and its newest attempt; ``pool`` reads files."""

    def __init__(
        self, directory: Path, query: LogQuery, ended: Callable[[], Awaitable[tuple[bool, int]]], pool: Pool
    ) -> None:
        self._directory = directory
        self._query = query
        self._ended = ended
        self._pool = pool

    async def batches(self) -> AsyncGenerator[Sequence[LogLine], None]:
        """Yield batches of lines, oldest first."""
        query = self._query
        ended, newest = await self._ended()
        reader = self._reader(newest)
        if query.tail is None:
            async for batch in self._in_pool(reader.batches(query.since)):
                yield batch
        else:
            for entries in batched(await self._pool.run(self._last, reader), BATCH_LINES):
                yield _lines(entries)
        while query.follow:
            # This order matters: the end is read first, so that all lines before it are read afterwards.
            ended, _ = await self._ended()
            async for batch in self._in_pool(reader.batches()):
                yield batch
            if ended:
                return
            await asyncio.sleep(FOLLOW_SECONDS)

    def _last(self, reader: LogReader) -> list[LogEntry]:
        query = self._query
        return [entry for entry in reader.last(query.tail or 0, query.since) if query.has(entry.text)]

    def _reader(self, newest: int) -> LogReader:
        query = self._query
        if query.attempt is not None or query.since is not None:
            return LogReader(self._directory, attempt=query.attempt, rank=query.rank)
        if query.follow:
            return LogReader(self._directory, rank=query.rank, first_attempt=newest)
        return LogReader(self._directory, attempt=newest or None, rank=query.rank)

    async def _in_pool(self, batches: Iterator[list[LogEntry]]) -> AsyncGenerator[Sequence[LogLine], None]:
        while (entries := await self._pool.run(self._next, batches)) is not None:
            if entries:
                yield _lines(entries)

    def _next(self, batches: Iterator[list[LogEntry]]) -> list[LogEntry] | None:
        entries = next(batches, None)
        return None if entries is None else [entry for entry in entries if self._query.has(entry.text)]


def _lines(entries: Sequence[LogEntry]) -> list[LogLine]:
    return [LogLine(at=e.at, attempt=e.attempt, rank=e.rank, stream=e.stream, text=e.text) for e in entries]


T = TypeVar("T")

REMEMBER_VIEWS: Final = 4096
MAX_CANDIDATES: Final = 5
READ_TOGETHER: Final = 100
"""Records that are read at once for a list."""


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
        progress: ProgressIntake,
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
        return await self._look(job, lambda: list_checkpoints(job, self._paths, verify=verify, newest=newest))

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
        return await self._look(job, lambda: choose(job, self._paths, step))

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
    shown = " or ".join(f"{name} ({job_id})" for name, job_id in error.candidates[:MAX_CANDIDATES])
    return NoSuchJobError(f"you have no job {error.reference!r}; other users have", hint=f"write {shown}")


def damaged_error(error: store_errors.UnreadableRecordError) -> RefusedError:
    """Return the API's error for a job whose record is damaged."""
    return RefusedError(
        str(error),
        hint="`orch doctor` lists what is damaged; docs/operations/upgrade.md has the way to restore a backup",
    )
