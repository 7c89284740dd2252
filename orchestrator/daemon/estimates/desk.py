"""Follows what jobs report, and estimates how long they will still run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from orchestrator import clock
from orchestrator.core.estimates.history import Mark, StepHistory
from orchestrator.core.estimates.time_left import time_left
from orchestrator.core.states import JobState
from orchestrator.daemon.estimates.record import Ended, Estimated, EstimateRecord
from orchestrator.daemon.jobs import metrics_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from orchestrator.core.estimates.time_left import TimeLeft
    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.train.script.progress_facts import ProgressSnapshot

SHARES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Shares of a job's steps: at each of them the estimate is recorded."""
LEAST_SECONDS: Final = 5.0
"""Shorter estimates are not recorded: jobs of a second would soon fill the record."""
AGAIN_SECONDS: Final = 1.0
AGAIN_SHARE: Final = 0.005
"""An estimate is recomputed after this share of it, at least AGAIN_SECONDS; until then passed time is subtracted."""


@dataclass(slots=True)
class _Followed:
    history: StepHistory = field(default_factory=StepHistory)
    leader: int = 0
    total: int | None = None
    reached: float = 0.0
    attempt: int = 0
    made_at: float = 0.0
    made: TimeLeft | None = None
    last_step: tuple[int, float] = (0, 0.0)
    """The attempt that reported the last step, and the time of its first such report."""

    def last_step_at(self, attempt: int) -> float | None:
        """Return when the attempt had done all steps; None where it has not reported that."""
        return self.last_step[1] if self.last_step[0] == attempt else None


class EstimateDesk:
    """Estimates of live jobs. ``clock`` returns Unix time. A record that cannot be written affects nothing else."""

    def __init__(
        self, record: EstimateRecord, *, clock: Callable[[], float] = clock.now, least_seconds: float = LEAST_SECONDS
    ) -> None:
        self._record = record
        self._clock = clock
        self._least_seconds = least_seconds
        self._jobs: dict[JobId, _Followed] = {}

    def follow(self, job: Job, attempt: int, rank: int, snapshot: ProgressSnapshot) -> None:
        """Add a rank's report, if it is the lowest rank of the attempt that reports steps."""
        if snapshot.step is None or snapshot.last_report_at is None:
            return
        followed = self._jobs.get(job.id)
        if followed is None:
            followed = self._jobs[job.id] = _Followed(leader=rank)
        if attempt > followed.attempt:
            followed.attempt, followed.leader = attempt, rank
        followed.leader = min(followed.leader, rank)
        if rank == followed.leader and self._took(followed, attempt, snapshot):
            self._note(job.id, followed)

    @staticmethod
    def _took(followed: _Followed, attempt: int, snapshot: ProgressSnapshot) -> bool:
        assert snapshot.step is not None
        assert snapshot.last_report_at is not None
        if snapshot.total_steps != followed.total:
            followed.total, followed.made = snapshot.total_steps, None
        if followed.total is not None and snapshot.step >= followed.total and followed.last_step[0] != attempt:
            followed.last_step = attempt, snapshot.last_report_at
        return followed.history.add(Mark(snapshot.last_report_at, attempt, snapshot.step, snapshot.phase))

    def _note(self, job_id: JobId, followed: _Followed) -> None:
        """Record the estimate when a further share of the steps is reached."""
        last = followed.history.marks[-1]
        done = last.step / followed.total if followed.total else 0.0
        reached = max((share for share in SHARES if share <= done), default=0.0)
        if reached <= followed.reached or followed.total is None:
            return
        followed.reached = reached
        left = time_left(followed.history.marks, followed.total)
        if left is None or left.low is None or left.high is None or left.seconds < self._least_seconds:
            return
        with contextlib.suppress(OSError):
            self._record.add(
                Estimated(
                    job=job_id,
                    attempt=last.attempt,
                    at=round(last.at, 3),
                    share=reached,
                    seconds=round(left.seconds, 3),
                    low=round(left.low, 3),
                    high=round(left.high, 3),
                )
            )

    def left(self, job_id: JobId) -> TimeLeft | None:
        """Return the time that a running job will still run, as of now; None where its reports do not show it."""
        followed = self._jobs.get(job_id)
        if followed is None or followed.total is None:
            return None
        now = self._clock()
        passed = now - followed.made_at
        made = followed.made
        if made is None or not 0.0 <= passed < max(AGAIN_SECONDS, AGAIN_SHARE * made.seconds):
            followed.made_at, passed = now, 0.0
            followed.made = made = time_left(followed.history.marks, followed.total, now=now)
        return None if made is None else _later(made, passed)

    def observe(self, job: Job, _event: Event) -> None:
        """Handle a job's record after an event: record the end of an estimated job."""
        if not job.state.is_terminal or (followed := self._jobs.pop(job.id, None)) is None:
            return
        if followed.reached > 0.0 and job.ended_at is not None:
            with contextlib.suppress(OSError):
                succeeded = job.state is JobState.SUCCEEDED
                at = followed.last_step_at(job.attempt_number) or job.ended_at
                self._record.add(Ended(job=job.id, attempt=job.attempt_number, ended_at=at, succeeded=succeeded))

    def resume(self, jobs: Iterable[tuple[JobId, Path]]) -> None:
        """Read what live jobs reported to an earlier daemon. Blocks."""
        for job_id, path in jobs:
            followed = _Followed()
            for attempt, snapshot in metrics_file.recent(path):
                self._took(followed, attempt, snapshot)
                followed.attempt = attempt
            marks = followed.history.marks
            if marks and followed.total:
                done = marks[-1].step / followed.total
                followed.reached = max((share for share in SHARES if share <= done), default=0.0)
            if marks:
                self._jobs[job_id] = followed


def _later(made: TimeLeft, passed: float) -> TimeLeft:
    """Return the estimate as it is ``passed`` seconds later."""

    def less(seconds: float) -> float:
        return max(0.0, seconds - passed)

    return replace(
        made,
        seconds=less(made.seconds),
        low=None if made.low is None else less(made.low),
        high=None if made.high is None else less(made.high),
    )
