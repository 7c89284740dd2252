"""Converts the jobs of a matrix to the API's view of the whole. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from orchestrator.analysis.estimates.makespan import time_left
from orchestrator.api.matrix_views import MatrixJobView, MatrixView
from orchestrator.core.facts.reasons import Cancelled
from orchestrator.core.facts.requesters import ByMatrix
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.api.views import JobView
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.requests.best_values import Reported

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


def by_combination(jobs: Sequence[Job]) -> tuple[Combined, ...]:
    """Return the jobs of one matrix by combination."""
    found: dict[int, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.submission.sequence):
        cell = job.submission.matrix
        if cell is not None:
            found.setdefault(cell.index, []).append(job)
    return tuple(Combined(index=index, jobs=tuple(found[index])) for index in sorted(found))


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
    jobs: Sequence[Job], views: Mapping[str, JobView], reported: Mapping[str, Reported], now: float
) -> MatrixView:
    """Return the view of the matrix; ``jobs`` are all of its jobs, at least one. ``reported`` has each job's score."""
    combined = by_combination(jobs)
    first = combined[0].newest
    cell = first.submission.matrix
    assert cell is not None
    score = first.spec.checkpoint
    states = [one.newest.state for one in combined]
    rows = tuple(_row(one, views, reported, highest=score.score_order == "max") for one in combined)
    ended = [job.ended_at for job in jobs if job.ended_at is not None]
    state = state_of(states)
    return MatrixView(
        id=cell.matrix_id,
        name=cell.name,
        user=first.submission.user,
        uid=first.submission.uid,
        state=state,
        submitted_at=min(job.submission.submitted_at for job in jobs),
        count=cell.count,
        counts=dict(Counter(state.value for state in states)),
        parameters=tuple(cell.values),
        max_concurrent=cell.max_concurrent,
        fail_fast=cell.fail_fast,
        score_attribute=score.score_attribute,
        score_order=score.score_order,
        eta_seconds=_left(combined, rows, cell.max_concurrent, now),
        ended_at=max(ended, default=None) if all(s.is_terminal for s in states) else None,
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
        started_at=job.started_at,
        ended_at=job.ended_at,
    )


def _left(combined: Sequence[Combined], rows: Sequence[MatrixJobView], limit: int | None, now: float) -> float | None:
    """Return the time until the last job ends: by running jobs' estimates, and the usual length of a job for the others."""
    lengths = [_length(row, now) for row in rows]
    known = [length for length in lengths if length is not None]
    open_ = [one for one in combined if not one.newest.state.is_terminal]
    if not open_ or not known:
        return None
    usual = median(known)
    running, waiting = [], []
    for one, row in zip(combined, rows, strict=True):
        if one.newest.state.is_terminal:
            continue
        if not one.newest.state.may_hold_gang:
            waiting.append(usual * (1.0 - (row.fraction or 0.0)))
            continue
        passed = now - (row.started_at or now)
        running.append(row.eta_seconds if row.eta_seconds is not None else max(0.0, usual - passed))
    return round(time_left(running, waiting, limit or max(1, len(running))), 3)


def _length(row: MatrixJobView, now: float) -> float | None:
    """Return the duration of a combination's job, of a running one as estimated."""
    if row.started_at is None:
        return None
    if row.ended_at is not None:
        return row.ended_at - row.started_at if row.state == JobState.SUCCEEDED else None
    return None if row.eta_seconds is None else now - row.started_at + row.eta_seconds
