"""Answers users' queries about matrices, with the best score of each job, and runs commands on every job of one."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.abandoned import stop_if_abandoned
from orchestrator.analysis.trials import best_trials, time_left
from orchestrator.api.errors import AmbiguousReferenceError, NotFoundError, Problem, RefusedError
from orchestrator.api.matrix_views import MatrixJobView, MatrixView
from orchestrator.api.protocol import Verb
from orchestrator.api.views import ActionReply
from orchestrator.core.facts.reasons import ByMatrix, Cancelled, is_pruned
from orchestrator.core.states import JobState
from orchestrator.daemon.jobs.metrics_file import values_since
from orchestrator.daemon.requests.actions import events_of
from orchestrator.daemon.requests.reader import named_by_others
from orchestrator.store import errors as store_errors
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from orchestrator.api.requests import ActionRequest
    from orchestrator.api.service import Caller
    from orchestrator.api.views import JobView
    from orchestrator.core import events as ev
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.requests.actions import JobActions
    from orchestrator.daemon.requests.reader import JobReader
    from orchestrator.daemon.searches import Searches, StudyRecord
    from orchestrator.runtime.pools import Pool
    from orchestrator.store.store import Store

KEPT_JOBS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Reported:
    """The best and the last value so far, and how far the file was read."""

    best: float | None = None
    last: float | None = None
    offset: int = 0


class BestValues:
    """Reads each line of a file once. For one thread at a time."""

    def __init__(self, path_of: Callable[[str], Path], kept: int = KEPT_JOBS) -> None:
        self._path_of = path_of
        self._kept = kept
        self._known: OrderedDict[tuple[str, str], Reported] = OrderedDict()

    def of(self, job_id: str, metric: str, *, highest: bool) -> Reported:
        """Return what the job has reported; nothing where it has no file, or one that is not orch's."""
        stop_if_abandoned()
        key = (job_id, metric)
        path = self._path_of(job_id)
        known = self._known.get(key)
        if known is None:  # a long run's file was rotated: the older lines come first
            known = self._read(path.with_name(f"{path.name}.1"), metric, Reported(), highest=highest)
            known = Reported(known.best, known.last)
        self._known[key] = found = self._read(path, metric, known, highest=highest)
        self._known.move_to_end(key)
        if len(self._known) > self._kept:
            self._known.popitem(last=False)
        return found

    @staticmethod
    def _read(path: Path, metric: str, known: Reported, *, highest: bool) -> Reported:
        try:
            values, offset = values_since(path, metric, known.offset)
        except OSError:
            return known
        if not values:
            return Reported(known.best, known.last, offset)
        choose = max if highest else min
        return Reported(choose(values if known.best is None else [known.best, *values]), values[-1], offset)


_ENDS = (JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """One combination: the jobs that have run it, the oldest first, at least one."""

    index: int
    jobs: tuple[Job, ...]

    @property
    def newest(self) -> Job:
        """Return the job that counts."""
        return self.jobs[-1]

    @property
    def failed(self) -> bool:
        """Whether it failed, or was ended because another one failed."""
        job = self.newest
        ended_with_others = isinstance(job.reason, Cancelled) and isinstance(job.reason.by, ByMatrix)
        return job.state is JobState.FAILED or (job.state is JobState.CANCELLED and ended_with_others)


@dataclass(frozen=True, slots=True)
class Searched:
    """Objectives of a search, `min` or `max` by name, and the record of its trials."""

    objectives: Mapping[str, str]
    study: StudyRecord

    def best(self) -> frozenset[int]:
        """Return the trials that no other one beats."""
        return frozenset(best_trials(self.study.given, tuple(self.objectives.values())))


def by_combination(jobs: Sequence[Job]) -> tuple[Combined, ...]:
    """Return the jobs of one matrix by combination."""
    found: dict[int, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.submission.sequence):
        cell = job.submission.matrix
        if cell is not None:
            found.setdefault(cell.index, []).append(job)
    return tuple(Combined(index=index, jobs=tuple(found[index])) for index in sorted(found))


def end_state(job: Job) -> JobState:
    """Return a job's state as it counts for the matrix: a pruned trial counts as succeeded."""
    return JobState.SUCCEEDED if job.state.is_terminal and is_pruned(job.reason) else job.state


def state_of(states: Sequence[JobState]) -> str:
    """Return the state of the whole matrix."""
    if all(state.is_terminal for state in states):
        return next((end.value for end in _ENDS if end in states), JobState.SUCCEEDED.value)
    open_ = [state for state in states if not state.is_terminal]
    if all(state is JobState.SUSPENDED for state in open_):
        return JobState.SUSPENDED.value
    begun = len(open_) < len(states) or any(state.may_hold_gang for state in open_)
    return JobState.RUNNING.value if begun else JobState.PENDING.value


def matrix_view(
    jobs: Sequence[Job],
    views: Mapping[str, JobView],
    reported: Mapping[str, Reported],
    now: float,
    searched: Searched | None = None,
) -> MatrixView:
    """Return the view of the matrix; ``jobs`` are all of its jobs, at least one. ``reported`` has each job's score."""
    combined = by_combination(jobs)
    first = combined[0].newest
    cell = first.submission.matrix
    assert cell is not None
    score = first.spec.checkpoint
    states = [end_state(one.newest) for one in combined]
    best = searched.best() if searched is not None else frozenset()
    rows = tuple(_row(one, views, reported, highest=score.score_order == "max") for one in combined)
    rows = tuple(_trial(row, one, searched, best) for row, one in zip(rows, combined, strict=True))
    ended = [job.ended_at for job in jobs if job.ended_at is not None]
    state = state_of(states)
    searching = searched is not None and not searched.study.over
    paused = searching and searched is not None and searched.study.paused
    if searching and all(one.is_terminal for one in states):
        state = JobState.SUSPENDED.value if paused else JobState.RUNNING.value
    more = max(0, cell.count - combined[-1].index - 1) if searching else 0
    left = None if paused else _left(combined, rows, cell.max_concurrent, now, more)
    return MatrixView(
        id=cell.matrix_id,
        name=cell.name,
        user=first.submission.user,
        uid=first.submission.uid,
        state=state,
        submitted_at=min(job.submission.submitted_at for job in jobs),
        count=cell.count,
        counts=dict(Counter(one.newest.state.value for one in combined)),
        parameters=tuple(cell.values),
        max_concurrent=cell.max_concurrent,
        fail_fast=cell.fail_fast,
        score_attribute=score.score_attribute,
        score_order=score.score_order,
        eta_seconds=None if left is None else left[0],
        eta_low_seconds=None if left is None else left[1],
        eta_high_seconds=None if left is None else left[2],
        ended_at=max(ended, default=None) if all(s.is_terminal for s in states) and not searching else None,
        objectives={} if searched is None else dict(searched.objectives),
        searching=searching,
        paused=paused,
        problem="" if searched is None else searched.study.problem,
        jobs=rows,
    )


def _row(
    one: Combined, views: Mapping[str, JobView], reported: Mapping[str, Reported], *, highest: bool
) -> MatrixJobView:
    job, cell = one.newest, one.newest.submission.matrix
    assert cell is not None
    view = views[job.id]
    best = [found.best for j in one.jobs if (found := reported.get(j.id)) and found.best is not None]
    newest = reported.get(job.id)
    return MatrixJobView(
        index=one.index,
        values=dict(cell.values),
        job_id=job.id,
        name=job.name,
        state=view.state,
        reason=view.reason,
        runs=len(one.jobs),
        best=(max if highest else min)(best, default=None),
        last=None if newest is None else newest.last,
        fraction=None if view.progress is None else view.progress.fraction,
        eta_seconds=None if view.progress is None else view.progress.eta_seconds,
        eta_low_seconds=None if view.progress is None else view.progress.eta_low_seconds,
        eta_high_seconds=None if view.progress is None else view.progress.eta_high_seconds,
        started_at=job.started_at,
        ended_at=job.ended_at,
    )


def _trial(row: MatrixJobView, one: Combined, searched: Searched | None, best: frozenset[int]) -> MatrixJobView:
    """Return the row with the results of the trial."""
    if searched is None:
        return row
    given = searched.study.given.get(one.index)
    return replace(
        row,
        pruned=one.newest.state.is_terminal and is_pruned(one.newest.reason),
        given={} if given is None else dict(zip(searched.objectives, given, strict=True)),
        missing=searched.study.missing.get(one.index, ""),
        is_best=one.index in best,
    )


def _left(
    combined: Sequence[Combined], rows: Sequence[MatrixJobView], limit: int | None, now: float, more: int
) -> tuple[float, float | None, float | None] | None:
    """Return the seconds until the last job ends, and bounds, by running jobs' estimates and the usual length.

    ``more`` are trials that are not submitted yet.

    Each bound is that of the case in which every job is at its own: wider than 95 %. None where a job has none.
    """
    known = [length for row in rows if (length := _length(row, now)) is not None]
    open_ = [(one, row) for one, row in zip(combined, rows, strict=True) if not one.newest.state.is_terminal]
    if (not open_ and not more) or not known:
        return None
    usual = _Span(median(known), min(known) if len(known) > 1 else None, max(known) if len(known) > 1 else None)
    running = [_running(row, usual, now) for one, row in open_ if one.newest.state.may_hold_gang]
    waiting = [usual.share(1.0 - (row.fraction or 0.0)) for one, row in open_ if not one.newest.state.may_hold_gang]
    waiting += [usual] * more
    at_once = limit or max(1, len(running))

    def until(pick: Callable[[_Span], float | None]) -> float | None:
        begun, later = [pick(span) for span in running], [pick(span) for span in waiting]
        if None in begun or None in later:
            return None
        return round(time_left([s for s in begun if s is not None], [s for s in later if s is not None], at_once), 3)

    seconds = until(lambda span: span.seconds)
    assert seconds is not None
    return seconds, until(lambda span: span.low), until(lambda span: span.high)


class _Span(NamedTuple):
    """Seconds, with their lower and upper bounds where those are known."""

    seconds: float
    low: float | None
    high: float | None

    def share(self, part: float) -> _Span:
        low, high = (None if bound is None else part * bound for bound in (self.low, self.high))
        return _Span(part * self.seconds, low, high)


def _running(row: MatrixJobView, usual: _Span, now: float) -> _Span:
    if row.eta_seconds is not None:
        return _Span(row.eta_seconds, row.eta_low_seconds, row.eta_high_seconds)
    passed = now - (row.started_at or now)
    low, high = (None if bound is None else max(0.0, bound - passed) for bound in (usual.low, usual.high))
    return _Span(max(0.0, usual.seconds - passed), low, high)


def _length(row: MatrixJobView, now: float) -> float | None:
    """Return the duration of a combination's job, estimated for a running one; None where it is unknown."""
    if row.started_at is None:
        return None
    if row.ended_at is not None:
        return row.ended_at - row.started_at if row.state == JobState.SUCCEEDED else None
    return None if row.eta_seconds is None else now - row.started_at + row.eta_seconds


_DONE = {
    Verb.CANCEL: "cancelled",
    Verb.PAUSE: "paused",
    Verb.RESUME: "put back into the queue",
    Verb.HOLD: "held",
    Verb.RELEASE: "put into the queue",
    Verb.UPDATE: "changed",
}


class Matrices:
    """Queries about matrices, and commands. ``best`` reads files, one query at a time, in threads of ``pool``."""

    def __init__(
        self,
        loop: Loop,
        store: Store,
        reader: JobReader,
        actions: JobActions,
        best: BestValues,
        searches: Searches,
        pool: Pool,
    ) -> None:
        self._loop = loop
        self._store = store
        self._reader = reader
        self._actions = actions
        self._best = best
        self._searches = searches
        self._pool = pool
        self._turn = asyncio.Lock()

    async def find(self, reference: str, caller: Caller) -> str | None:
        """Return the id of the matrix that a reference means; None where it means a job. Raises AmbiguousReferenceError, NoSuchJobError."""
        try:
            return await self._store.find_matrix(reference, caller.uid)
        except store_errors.NamedByOthersError as error:
            raise named_by_others(error) from error
        except store_errors.AmbiguousJobError as error:
            problems = [Problem(message=str(candidate)) for candidate in error.candidates]
            raise AmbiguousReferenceError(f"{reference!r} fits several matrices", problems=problems) from error

    async def matrix(self, matrix_id: str) -> MatrixView:
        """Return the matrix with this id. Raises NotFoundError."""
        jobs = await self._jobs(matrix_id)
        views = await self._reader.views_of(jobs)
        score = jobs[0].spec.checkpoint
        reported: Mapping[str, Reported] = {}
        if score.score_attribute is not None:
            async with self._turn:
                reported = await self._pool.run(
                    self._reported, [job.id for job in jobs], score.score_attribute, score.score_order == "max"
                )
        searched = await self._pool.run(self._searched, matrix_id) if _is_search(jobs) else None
        return matrix_view(jobs, {view.id: view for view in views}, reported, self._loop.now(), searched)

    def _searched(self, matrix_id: str) -> Searched | None:
        book = self._searches.book
        plan = book.plan(matrix_id)
        return None if plan is None else Searched(plan.objectives, book.study(matrix_id))

    def _reported(self, job_ids: Sequence[str], metric: str, highest: bool) -> Mapping[str, Reported]:  # noqa: FBT001 - pools pass positional arguments
        return {job_id: self._best.of(job_id, metric, highest=highest) for job_id in job_ids}

    async def _jobs(self, matrix_id: str) -> list[Job]:
        stored = await self._store.matrix_jobs(matrix_id)
        if not stored:
            raise NotFoundError(f"there is no matrix {matrix_id!r}", hint="`orch matrix` lists the matrices")
        return [self._loop.jobs.get(job.id, job) for job in stored]

    async def act(self, matrix_id: str, request: ActionRequest, caller: Caller) -> ActionReply:
        """Run a command on every job of a matrix that it applies to, in one step; durable once this returns."""
        jobs = [one.newest for one in by_combination(await self._jobs(matrix_id))]
        if request.verb is Verb.RERUN:
            return await self._rerun(matrix_id, request, caller)
        self._actions.check(request, caller)
        further = ""
        if _is_search(jobs):
            further = await self._steer(matrix_id, request.verb)
            jobs = [
                one.newest for one in by_combination(await self._jobs(matrix_id))
            ]  # a trial may have come meanwhile
        done: list[str] = []

        def make() -> list[ev.Event]:
            events: list[ev.Event] = []
            done.clear()
            for job in jobs:
                live = self._loop.decided.get(job.id)
                found = [] if live is None else events_of(live, request, caller, self._loop.now())
                if found:
                    done.append(job.id)
                    events += found
            return events

        await self._loop.command(make)
        jobs = [one.newest for one in by_combination(await self._jobs(matrix_id))]
        states = [job.state for job in jobs]
        if not done and not further and request.verb is not Verb.CANCEL and all(state.is_terminal for state in states):
            raise RefusedError(f"every job of {matrix_id} has ended", hint=f"`orch rerun {matrix_id}` runs them again")
        if not done and not further and request.verb is Verb.HOLD:
            raise RefusedError(f"no job of {matrix_id} waits in the queue", hint=f"`orch pause {matrix_id}` stops them")
        message = f"{len(done)} of {plural(len(jobs), 'job')} {_DONE[request.verb]}{further}"
        return ActionReply(job_id=matrix_id, state=state_of(states), message=message, job_ids=tuple(done))

    async def _steer(self, matrix_id: str, verb: Verb) -> str:
        """Stop, pause or resume a search, as a command on all of its jobs requires; return what the reply adds."""
        match verb:
            case Verb.CANCEL:
                await self._searches.stop(matrix_id)
            case Verb.PAUSE | Verb.HOLD if await self._searches.pause(matrix_id):
                lifted = Verb.RESUME if verb is Verb.PAUSE else Verb.RELEASE
                return f"; no further trial is submitted until `orch {lifted} {matrix_id}`"
            case Verb.RESUME | Verb.RELEASE if await self._searches.resume(matrix_id):
                return "; the search goes on"
            case _:
                pass
        return ""

    async def _rerun(self, matrix_id: str, request: ActionRequest, caller: Caller) -> ActionReply:
        """Rerun the combinations that have ended, or only the failed ones; all or none."""
        ended = [one for one in by_combination(await self._jobs(matrix_id)) if one.newest.state.is_terminal]
        again = [one.newest for one in ended if one.failed or not request.failed]
        if not again:
            what = "failed" if request.failed else "has ended"
            raise RefusedError(f"no job of {matrix_id} {what}", hint=f"`orch matrix {matrix_id}` shows where they are")
        reply = await self._actions.rerun_all(again, request, caller, in_matrix=True)
        changed = f" with {', '.join(request.overrides)}" if request.overrides else ""
        message = f"runs {plural(len(again), 'combination')} again{changed}"
        return ActionReply(job_id=matrix_id, state=JobState.PENDING.value, message=message, job_ids=reply.job_ids)


def _is_search(jobs: Sequence[Job]) -> bool:
    return any(job.submission.matrix is not None and job.submission.matrix.search for job in jobs)
