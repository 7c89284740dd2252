"""Code shared by both stores: the changes of a batch by job, their side effects, and comparing submissions. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.core.notices import notices_of
from orchestrator.store.errors import BrokenChainError, IdempotencyConflictError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core import events as ev
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.fold import Change
    from orchestrator.core.notices import Notice


@dataclass(frozen=True, slots=True)
class JobChanges:
    """Consecutive changes of one job. Raises BrokenChainError where one does not follow from its predecessor."""

    changes: tuple[Change, ...]

    def __post_init__(self) -> None:
        version = self.before.version
        for change in self.changes:
            if change.before.version != version or change.after.version != version + 1:
                raise BrokenChainError(self.before.id, version)
            version += 1

    @property
    def before(self) -> Job:
        """The record before the first change."""
        return self.changes[0].before

    @property
    def after(self) -> Job:
        """The record after the last change."""
        return self.changes[-1].after

    @property
    def ends(self) -> bool:
        """Whether the job becomes terminal."""
        return self.after.state.is_terminal and not self.before.state.is_terminal

    def notices(self) -> list[Notice]:
        """Return the notices for web hooks."""
        return [n for c in self.changes for n in notices_of(c.before, c.after, c.event.at)]


def by_job(changes: Sequence[Change]) -> list[JobChanges]:
    """Return the changes of each job, jobs in order of first mention. Raises BrokenChainError."""
    found: dict[JobId, list[Change]] = {}
    for change in changes:
        found.setdefault(change.before.id, []).append(change)
    return [JobChanges(tuple(of_job)) for of_job in found.values()]


def one_submission(events: Sequence[ev.JobSubmitted], known: Sequence[Job | None]) -> list[Job] | None:
    """Return the jobs that these events created before; None where no key is known. Raises IdempotencyConflictError.

    ``known`` has the job of each event's key.
    """
    jobs = [job for job in known if job is not None]
    for event, job in zip(events, known, strict=True):
        if job is not None and (len(jobs) < len(events) or not same_submission(job, event)):
            raise IdempotencyConflictError(event.idempotency_key, job.id)
    return jobs or None


def same_submission(job: Job, event: ev.JobSubmitted) -> bool:
    """Whether ``event`` requests the existing job: equal spec, archive and origin."""
    return (
        job.submission.snapshot == event.snapshot
        and job.submission.resume_from == event.resume_from
        and job.submission.rerun_of == event.rerun_of
        and job.spec == event.spec
        and _cell(job.submission.matrix) == _cell(event.matrix)
    )


def _cell(matrix: ev.MatrixCell | None) -> tuple[object, ...] | None:
    """Return the part of a cell that is the same in a repeated request: a matrix gets its id when it is accepted."""
    return None if matrix is None else (matrix.name, matrix.index, matrix.count, tuple(matrix.values.items()))


def finished_class(job: Job) -> str:
    """Return the failure class under which a finished job is counted; "" when it did not fail."""
    return job.failure.failure_class.value if job.failure is not None else ""
