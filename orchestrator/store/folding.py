"""What both stores share: folding a batch of events, and comparing submissions. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core.fold import fold
from orchestrator.core.notices import notices_of
from orchestrator.spec.job import from_dict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core import events as ev
    from orchestrator.core.ids import JobId
    from orchestrator.core.job import Job
    from orchestrator.core.notices import Notice


@dataclass(frozen=True, slots=True)
class Written:
    """An event that changed its job, and the number it gets."""

    number: int
    event: ev.Event


@dataclass(slots=True)
class Folded:
    """A batch after its fold: every job named, before and after, and the events that changed something."""

    before: dict[JobId, Job] = field(default_factory=dict)
    after: dict[JobId, Job] = field(default_factory=dict)
    written: list[Written] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    def changed(self) -> list[tuple[Job, Job]]:
        """Jobs that changed: record before and after."""
        return [(self.before[i], job) for i, job in self.after.items() if job is not self.before[i]]


def fold_batch(read: Callable[[JobId], Job], events: Sequence[ev.Event]) -> Folded:
    """Fold ``events`` in order, each onto what ``read`` or the events before it gave. Raises what fold and read raise."""
    batch = Folded()
    for event in events:
        if event.job_id not in batch.after:
            batch.before[event.job_id] = batch.after[event.job_id] = read(event.job_id)
        job = batch.after[event.job_id]
        after = fold(job, event)
        if after is not job:
            batch.after[event.job_id] = after
            batch.written.append(Written(after.version, event))
            batch.notices += notices_of(job, after, event.at)
    return batch


def same_submission(job: Job, event: ev.JobSubmitted) -> bool:
    """Whether ``event`` asks for the job that exists: equal spec, snapshot and origin."""
    return (
        job.snapshot == event.snapshot
        and job.resume_from == event.resume_from
        and job.rerun_of == event.rerun_of
        and job.spec == from_dict(dict(event.spec))
    )


def finished_class(job: Job) -> str:
    """The failure class that a finished job is counted under; "" when it did not fail."""
    return job.failure.failure_class.value if job.failure is not None else ""
