"""Estimates of the time that live jobs still need, and ``estimates.jsonl``, which compares them with the jobs' real ends.

A line is appended at certain shares of a job's steps and at its end, so that a daemon that is killed loses nothing. The file is small:
at ``most_bytes`` it becomes ``estimates.jsonl.1`` in place of an older one.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from orchestrator import clock
from orchestrator.api.usage_views import EstimateQualityView, EstimateShareView
from orchestrator.core.estimates import CONFIDENCE, Mark, StepHistory, time_left
from orchestrator.core.states import JobState
from orchestrator.daemon.jobs import metrics_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from orchestrator.core.estimates import TimeLeft
    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.train.script.progress_reading import ProgressSnapshot

MAX_BYTES: Final = 1024 * 1024
MAX_LINE_BYTES: Final = 4096
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """Estimate made when ``share`` of the job's steps were done; ``at`` is a Unix time, the others are seconds."""

    job: str
    attempt: int
    at: float
    share: float
    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """End of a job that was estimated, and whether the job succeeded."""

    job: str
    attempt: int
    ended_at: float
    succeeded: bool


class EstimateRecord:
    """Appends and reads lines; from any thread, one at a time."""

    def __init__(self, path: Path, most_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes

    @classmethod
    def of(cls, home: Path) -> EstimateRecord:
        """Return the record of this home."""
        return cls(home / "estimates.jsonl")

    def add(self, line: Estimated | Ended) -> None:
        """Append a line. Raises OSError; a line that does not fit on the disk is not begun."""
        data = (json.dumps(asdict(line)) + "\n").encode()
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _FLAGS, 0o600)
        try:
            size = os.fstat(handle).st_size
            if os.write(handle, data) < len(data):
                os.ftruncate(handle, size)
        finally:
            os.close(handle)
        if size + len(data) > self._most_bytes:
            self._path.replace(self._older)

    @property
    def _older(self) -> Path:
        return self._path.with_name(f"{self._path.name}.1")

    def lines(self) -> Iterator[Estimated | Ended]:
        """Yield every valid line, the oldest first."""
        for path in (self._older, self._path):
            try:
                handle = os.open(path, os.O_RDONLY | _FLAGS)
            except OSError:
                continue
            with os.fdopen(handle, "rb") as file:
                while line := file.readline(MAX_LINE_BYTES):
                    found = _parsed(line)
                    if found is not None:
                        yield found


def _parsed(line: bytes) -> Estimated | Ended | None:
    try:
        body = json.loads(line)
        if "share" in body:
            numbers = {name: _finite(body[name]) for name in ("at", "share", "seconds", "low", "high")}
            return Estimated(job=str(body["job"]), attempt=int(body["attempt"]), **numbers)
        return Ended(
            job=str(body["job"]),
            attempt=int(body["attempt"]),
            ended_at=_finite(body["ended_at"]),
            succeeded=body["succeeded"] is True,
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None  # a line that a crash cut short


def _finite(value: Any) -> float:
    number = float(value)
    if not 0.0 <= number < 1e15:
        raise ValueError("out of range")
    return number


@dataclass(frozen=True, slots=True)
class _Checked:
    share: float
    within: bool
    error: float


def quality(lines: Iterator[Estimated | Ended] | Sequence[Estimated | Ended]) -> EstimateQualityView:
    """Return how often the interval held the time that a job took, for estimates in the attempt that succeeded. Pure."""
    open_: dict[str, list[Estimated]] = {}
    checked: list[_Checked] = []
    interrupted = jobs = 0
    for line in lines:
        if isinstance(line, Estimated):
            open_.setdefault(line.job, []).append(line)
            continue
        made = open_.pop(line.job, [])
        same = [one for one in made if line.succeeded and one.attempt == line.attempt]
        checked += [_check(one, line) for one in same]
        interrupted += len(made) - len(same)
        jobs += bool(same)
    shares = sorted({one.share for one in checked})
    return EstimateQualityView(
        confidence=CONFIDENCE,
        jobs=jobs,
        checked=len(checked),
        within=sum(one.within for one in checked),
        interrupted=interrupted,
        median_error=median(one.error for one in checked) if checked else None,
        shares=tuple(_share(share, [one for one in checked if one.share == share]) for share in shares),
    )


def _check(made: Estimated, end: Ended) -> _Checked:
    real = max(0.0, end.ended_at - made.at)
    return _Checked(made.share, made.low <= real <= made.high, abs(made.seconds - real) / max(real, 1e-3))


def _share(share: float, found: Sequence[_Checked]) -> EstimateShareView:
    return EstimateShareView(
        share=share,
        checked=len(found),
        within=sum(one.within for one in found),
        median_error=median(one.error for one in found),
    )


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


class Estimates:
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
