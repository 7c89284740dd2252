"""Combines the reports of ranks and their actors about checkpoints into one observation of a job's saves. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis.observation import SavesSeen, StorageSeen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from orchestrator.core.job.record import Job
    from orchestrator.train.script.progress import CheckpointFacts, ProgressSnapshot

RETRIED_SECONDS: Final = 10.0
FAILING_SECONDS: Final = 60.0
"""A single failed save counts as two once nothing has been saved for this long after it."""


def saves_seen(
    job: Job,
    snapshots: Mapping[int, ProgressSnapshot],
    storage: Mapping[int, StorageSeen],
    interval_seconds: float | None,
    now: float,
) -> SavesSeen:
    """Return the job's saves: those that ranks write themselves, by their reports, and those of snapshots, by their actors."""
    durable = job.checkpoints.durable_at or 0.0
    failing = [*_failing(snapshots, durable), *(_settled(one, now) for one in storage.values() if one.failures)]
    worst = max(failing, key=lambda one: one.failures, default=None)
    attempt, since = job.attempt, None
    if attempt is not None and attempt.first_step_at is not None:
        since = max(job.checkpoints.at or 0.0, attempt.first_step_at)
    return SavesSeen(
        failures=_failures(worst, now) if worst is not None else 0,
        said=worst.said if worst is not None else "",
        cause=worst.cause if worst is not None else "",
        ever=job.checkpoints.at is not None,
        unsaved_seconds=None if since is None else max(0.0, now - since),
        interval_seconds=interval_seconds,
        stall_seconds=max((one.save_seconds or 0.0 for one in snapshots.values() if one.saves > 1), default=None),
        waited_seconds=max((one.checkpoint.waited_seconds for one in snapshots.values()), default=0.0),
    )


def _failing(snapshots: Mapping[int, ProgressSnapshot], durable: float) -> Iterator[StorageSeen]:
    """Yield an observation for each rank with a failed newest save of its own after which nothing was stored."""
    for snapshot in snapshots.values():
        facts: CheckpointFacts = snapshot.checkpoint
        if facts.failed_at is not None and facts.failed_at > max(durable, facts.saved_at or 0.0):
            yield StorageSeen(
                failures=max(1, facts.failed_saves),
                failing_since=facts.failed_at,
                cause=facts.failure_kind,
                said=facts.failure,
            )


def _settled(seen: StorageSeen, now: float) -> StorageSeen:
    """Count failures as one until they last: the actor tries again every two seconds, and storage may be back soon."""
    lasting = seen.failing_since is not None and now - seen.failing_since >= RETRIED_SECONDS
    return seen if lasting else replace(seen, failures=1)


def _failures(worst: StorageSeen, now: float) -> int:
    lasting = worst.failing_since is not None and now - worst.failing_since >= FAILING_SECONDS
    return max(worst.failures, 2 if lasting else 1)
