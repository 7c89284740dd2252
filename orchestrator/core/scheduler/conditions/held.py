"""Decides whether a waiting job may be considered now: its start time, and how many jobs of its matrix run at a time. Pure.

A job that is held back claims nothing. Its dependencies are in ``prerequisites.py``; ``release.py`` keeps both between decisions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core.facts.reasons import AwaitsTime, MatrixAtLimit
from orchestrator.core.facts.requesters import ByMatrix
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.states import JobState, StopPurpose

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from orchestrator.core import events as ev
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBack:
    """Reasons why jobs may not start yet, and the time at which the first of them may."""

    waiting: Mapping[JobId, Fact] = field(default_factory=dict)
    wake_at: float | None = None


def held_back(jobs: Iterable[Job], blocked: Container[JobId], now: float) -> HeldBack:
    """Return what keeps waiting jobs from being considered; ``blocked`` are those that wait for other jobs."""
    waiting: dict[JobId, Fact] = {}
    wake_at: float | None = None
    used: Counter[str] = Counter()
    limited: list[Job] = []
    for job in jobs:
        start_at = begins_at(job)
        if start_at > now:
            waiting[job.id] = AwaitsTime(start_at=start_at)
            wake_at = start_at if wake_at is None else min(wake_at, start_at)
            continue
        cell = job.submission.matrix
        if cell is None or cell.max_concurrent is None:
            continue
        if job.state is JobState.PENDING and job.id not in blocked:
            limited.append(job)
        elif job.state.may_hold_gang:
            used[cell.matrix_id] += 1
    waiting |= _over_limit(limited, used)
    return HeldBack(waiting=waiting, wake_at=wake_at)


def begins_at(job: Job) -> float:
    """Return the earliest start of the job's first attempt by its job.yaml; 0 for at once, and once it has started."""
    start_at = job.spec.start_at
    waits = start_at is not None and job.state is JobState.PENDING and not job.attempts
    return start_at.timestamp() if waits and start_at is not None else 0.0


def place_in_matrix(job: Job) -> tuple[bool, int, int]:
    """Return the sort key for the places of a matrix."""
    return not job.attempts, -job.priority, job.submission.sequence


def _over_limit(limited: list[Job], used: Counter[str]) -> dict[JobId, Fact]:
    """Return the jobs beyond their matrix's ``max_concurrent``: those that have run come first, then priority and arrival."""
    waiting: dict[JobId, Fact] = {}
    for job in sorted(limited, key=place_in_matrix):
        cell = job.submission.matrix
        assert cell is not None
        assert cell.max_concurrent is not None
        if used[cell.matrix_id] < cell.max_concurrent:
            used[cell.matrix_id] += 1
        else:
            waiting[job.id] = MatrixAtLimit(matrix=cell.matrix_id, limit=cell.max_concurrent)
    return waiting


def fail_fast(jobs: Iterable[Job], failed: Mapping[str, JobId], now: float) -> list[ev.Event]:
    """Return the events that end the other jobs of the matrices in ``failed``, which has each one's failed job."""
    found: list[ev.Event] = []
    for job in jobs:
        cell = job.submission.matrix
        if cell is not None and cell.fail_fast and cell.matrix_id in failed:
            by = ByMatrix(matrix=cell.matrix_id, job=failed[cell.matrix_id])
            found += request_stop(job, StopPurpose.CANCEL, by, now)
    return found
