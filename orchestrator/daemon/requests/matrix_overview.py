"""Converts the jobs of a matrix to the API's view of the matrix. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.analysis.estimates.makespan import time_left
from orchestrator.analysis.search.best import best_trials
from orchestrator.api.matrix_views import MatrixJobView, MatrixView
from orchestrator.core.facts.reasons import Cancelled, is_pruned
from orchestrator.core.facts.requesters import ByMatrix
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.api.views import JobView
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.requests.best_values import Reported
    from orchestrator.daemon.search.book import StudyRecord

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
