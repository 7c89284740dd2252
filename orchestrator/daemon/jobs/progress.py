"""Reports of training processes: the newest per job in memory, at most one line a second in ``metrics.jsonl``.

Progress is not an event. Some reports cause one: a new complete checkpoint, the first new step of an attempt, the
interval of automatic saves, and a failed save.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final, Protocol

from orchestrator import clock
from orchestrator.checkpoint.errors import NOT_FAILING, failure_cause
from orchestrator.core import events as ev
from orchestrator.core.diagnosis.observation import Pace, paces
from orchestrator.core.facts import notes as n
from orchestrator.daemon.jobs import metrics_file
from orchestrator.gpu.drivers.simulated import is_simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.estimates import TimeLeft
    from orchestrator.core.events import Event
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.changes import Changes
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths
    from orchestrator.train.script.progress_reading import ProgressSnapshot

METRICS_SECONDS = 1.0
RANKS_SECONDS = 5.0
"""Interval of the lines that also have each rank's step time."""
BACKLOG_SECONDS = 0.5
"""Waiting for storage is reported once it has taken this long, and again each time that it has doubled."""
REMEMBER_RECALLED = 4096
MAX_NOTES = 100
"""Notes of one kind that one job may cause during the daemon's lifetime."""
REPORTED_AGAIN_FACTOR = 2.0
"""A measured interval between saves is reported again once it has changed by more than this factor."""


def no_real_gpu(job: Job) -> bool:
    """Whether none of the job's GPUs is a real one."""
    return all(is_simulated(uuid) for seat in job.seats for uuid in seat.gpu_uuids)


@dataclass(slots=True)
class JobProgress:
    """The newest reports of one job's attempt, by rank: of the one before until a rank of the current one has reported.

    A daemon that has restarted knows only rank 0's, from the job's file of metrics, without its times. Ranks that have ended stay.
    """

    attempt: int = 0
    ranks: dict[int, ProgressSnapshot] = field(default_factory=dict)
    highest_step: int = 0
    previous_step: int = 0
    written_at: float = 0.0
    ranks_written_at: float = 0.0
    written_step: int | None = None
    written_report_at: float | None = None
    quarantined: set[str] = field(default_factory=set)
    unusable: set[tuple[int, str]] = field(default_factory=set)
    notes: Counter[str] = field(default_factory=Counter)
    memory_notes: set[Fact] = field(default_factory=set)
    failing: tuple[str, str] = NOT_FAILING
    waited_seconds: float = 0.0
    left_out: int = 0
    left_out_seen: int = 0
    interval_steps: int | None = None

    @property
    def leader(self) -> ProgressSnapshot | None:
        """Return rank 0's report, or the lowest rank's that has reported a step."""
        reported = [(rank, s) for rank, s in sorted(self.ranks.items()) if s.step is not None]
        return reported[0][1] if reported else None

    def paces(self, *, busy_is_work: bool = True) -> tuple[Pace, ...]:
        """Return each rank's time for a step, and its part without waiting; only for ranks that report steps.

        ``busy_is_work``: processor time is work. With a real GPU it is not: a thread that waits for one spins.
        """
        known = {rank: s for rank, s in self.ranks.items() if s.recent_step_seconds}
        return paces(
            {rank: median(s.recent_step_seconds) for rank, s in known.items()},
            {rank: s.metrics for rank, s in known.items()},
            {rank: s.busy_seconds if busy_is_work else None for rank, s in known.items()},
        )


class ProgressTable:
    """Progress of every live job, and of jobs recalled from their files."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, JobProgress] = {}
        self._recalled: OrderedDict[JobId, JobProgress | None] = OrderedDict()

    def of(self, job_id: JobId) -> JobProgress | None:
        """Return the job's newest progress, as far as it was reported or recalled."""
        return self._jobs.get(job_id) or self._recalled.get(job_id)

    def knows(self, job_id: JobId) -> bool:
        """Whether the job has reported, or was recalled."""
        return job_id in self._jobs or job_id in self._recalled

    def recall(self, places: Mapping[JobId, Path]) -> None:
        """Read from their metrics files what these jobs reported to an earlier daemon. Blocks; callable from any thread."""
        for job_id, path in places.items():
            if not self.knows(job_id):
                self._recalled[job_id] = _recalled(path)
                while len(self._recalled) > REMEMBER_RECALLED:
                    self._recalled.popitem(last=False)

    def resume(self, jobs: Iterable[tuple[Job, Path]]) -> None:
        """Like ``recall``, for live jobs: their next reports continue from it. Blocks."""
        for job, path in jobs:
            progress = _recalled(path)
            if progress is not None and progress.attempt <= job.attempt_number:
                self._jobs[job.id] = progress

    def settle(self, job_id: JobId, path: Path) -> None:
        """Write the job's newest report to its file, unless that was done."""
        book = self._jobs.get(job_id)
        if book is not None:
            self._write_metrics(book, path, last=True)

    def all(self) -> Mapping[JobId, JobProgress]:
        """Return every job's newest progress."""
        return self._jobs

    def previous_step(self, job_id: JobId) -> int:
        """Return the highest step that any attempt of the job reported."""
        book = self._jobs.get(job_id)
        return book.highest_step if book else 0

    def forget(self, job_id: JobId) -> None:
        """Drop a job that has ended."""
        self._jobs.pop(job_id, None)

    def take(self, job: Job, attempt: int, rank: int, snapshot: ProgressSnapshot, path: Path) -> list[ev.Event]:
        """Record a report; return the events that follow from it."""
        book = self._jobs.setdefault(job.id, JobProgress())
        if attempt < book.attempt:
            return []
        if attempt > book.attempt:
            self._write_metrics(book, path, last=True)
            book.attempt, book.ranks, book.previous_step = attempt, {}, book.highest_step
            book.waited_seconds, book.left_out = 0.0, 0
        book.ranks[rank] = snapshot
        if not snapshot.guessed:
            book.highest_step = max(book.highest_step, snapshot.max_step or 0)
        self._write_metrics(book, path, job=job)
        notes = [
            *_unusable(job, book, rank, snapshot),
            *_notes(job, book, snapshot),
            *((*_interval(job, book, snapshot), *_backlog(job, book, snapshot)) if rank == 0 else ()),
        ]
        return [
            *_checkpoint(job, attempt, snapshot),
            *_first_step(job, attempt, book, snapshot),
            *_few(job, book, notes),
        ]

    def _write_metrics(self, book: JobProgress, path: Path, *, last: bool = False, job: Job | None = None) -> None:
        """Write at most one line a second, and one for each step; the ``last`` one whenever it was not written."""
        leader = book.leader
        now = clock.now()
        if leader is None or (leader.step, leader.last_report_at) == (book.written_step, book.written_report_at):
            return
        if not last and (now - book.written_at < METRICS_SECONDS or leader.step == book.written_step):
            return
        book.written_at, book.written_step, book.written_report_at = now, leader.step, leader.last_report_at
        # A full disk costs history, never the job; `orch status` still shows the newest report.
        with contextlib.suppress(OSError):
            at, ranks = leader.last_report_at or now, () if job is None else _due_paces(job, book, now)
            metrics_file.append(path, book.attempt, book.highest_step, leader, at, ranks=ranks)


def _due_paces(job: Job, book: JobProgress, now: float) -> tuple[Pace, ...]:
    if len(book.ranks) < 2 or now - book.ranks_written_at < RANKS_SECONDS:
        return ()
    book.ranks_written_at = now
    return book.paces(busy_is_work=no_real_gpu(job))


def _recalled(path: Path) -> JobProgress | None:
    found = metrics_file.newest(path)
    if found is None:
        return None
    attempt, highest, snapshot = found
    return JobProgress(
        attempt=attempt,
        ranks={0: snapshot},
        highest_step=highest,
        written_step=snapshot.step,
        written_report_at=snapshot.last_report_at,
    )


def _checkpoint(job: Job, attempt: int, snapshot: ProgressSnapshot) -> list[ev.Event]:
    facts = snapshot.checkpoint
    if facts.saved_step is None or (job.checkpoints.at is not None and facts.saved_step <= job.checkpoints.step):
        return []
    at = facts.saved_at or clock.now()
    return [ev.CheckpointSaved(job_id=job.id, at=at, attempt=attempt, step=facts.saved_step, path=facts.saved_path)]


def _first_step(job: Job, attempt: int, book: JobProgress, snapshot: ProgressSnapshot) -> list[ev.Event]:
    current = job.attempt
    if current is None or current.number != attempt or current.first_step_at is not None:
        return []
    if snapshot.new_step is None or snapshot.new_step_at is None:
        return []
    resumed = snapshot.checkpoint.resumed_step
    if resumed is None:  # a script that loads by itself begins with its given checkpoint
        resumed = current.start_step if job.spec.checkpoint.watch is not None else 0
    lost = max(0, book.previous_step - resumed) if attempt > 1 else 0
    return [
        ev.FirstStep(
            job_id=job.id,
            at=clock.now(),
            attempt=attempt,
            step=snapshot.new_step,
            step_at=snapshot.new_step_at,
            steps_lost=lost,
        )
    ]


def _unusable(job: Job, book: JobProgress, rank: int, snapshot: ProgressSnapshot) -> list[ev.JobNoted]:
    """Return a note for each field of a rank's report that is invalid, once each."""
    fresh = [name for name in snapshot.unusable if (rank, name) not in book.unusable]
    if not fresh:
        return []
    book.unusable.update((rank, name) for name in fresh)
    return [_noted(job, n.UnusableValues(rank=rank, fields=tuple(fresh)))]


def _noted(job: Job, note: Fact) -> ev.JobNoted:
    return ev.JobNoted(job_id=job.id, at=clock.now(), note=note)


def _few(job: Job, book: JobProgress, notes: list[ev.JobNoted]) -> list[ev.JobNoted]:
    """Return the notes up to a limit per kind: a script could cause one every second."""
    kept = []
    for note in notes:
        code = note.note.code
        book.notes[code] += 1
        if book.notes[code] < MAX_NOTES:
            kept.append(note)
        elif book.notes[code] == MAX_NOTES:
            last = n.LastOfItsKind(note=note.note, most=MAX_NOTES)
            kept.append(ev.JobNoted(job_id=job.id, at=note.at, note=last))
    return kept


def _notes(job: Job, book: JobProgress, snapshot: ProgressSnapshot) -> list[ev.JobNoted]:
    notes: list[ev.JobNoted] = []
    for message in snapshot.checkpoint.quarantined:
        if message not in book.quarantined and len(book.quarantined) < MAX_NOTES:
            book.quarantined.add(message)
            notes.append(_noted(job, n.CheckpointQuarantined(said=message)))
    failure = snapshot.checkpoint.failure
    cause = failure_cause(failure, snapshot.checkpoint.failure_kind)
    if failure and cause != book.failing:
        notes.append(_noted(job, n.SaveFailed(said=failure)))
    book.failing = cause
    memory = _memory_note(job, snapshot)
    if memory is not None and memory not in book.memory_notes and len(book.memory_notes) < MAX_NOTES:
        book.memory_notes.add(memory)
        notes.append(_noted(job, memory))
    return notes


def _interval(job: Job, book: JobProgress, snapshot: ProgressSnapshot) -> list[ev.JobNoted]:
    """Return the job's interval of automatic saves with its reason: at first, and after a large change."""
    steps, reported = snapshot.checkpoint.interval_steps, book.interval_steps
    if steps is None or (
        reported is not None and reported <= REPORTED_AGAIN_FACTOR * steps and steps <= REPORTED_AGAIN_FACTOR * reported
    ):
        return []
    book.interval_steps = steps
    return [_noted(job, n.SaveInterval(steps=steps, said=snapshot.checkpoint.interval_reason))]


def _backlog(job: Job, book: JobProgress, snapshot: ProgressSnapshot) -> list[ev.JobNoted]:
    """Return notes on saves that wait for storage, and on those that were dropped because storage failed."""
    facts = snapshot.checkpoint
    notes: list[ev.JobNoted] = []
    if facts.waited_seconds >= max(BACKLOG_SECONDS, REPORTED_AGAIN_FACTOR * book.waited_seconds):
        book.waited_seconds = facts.waited_seconds
        notes.append(_noted(job, n.StorageBacklog(waited_seconds=facts.waited_seconds, saves=facts.waits)))
    # While storage fails, a script that saves every second would fill the events: each doubling is reported, and the last.
    more, no_more_now = facts.left_out > book.left_out, facts.left_out == book.left_out_seen
    book.left_out_seen = facts.left_out
    if more and (no_more_now or facts.left_out >= REPORTED_AGAIN_FACTOR * book.left_out):
        book.left_out = facts.left_out
        notes.append(_noted(job, n.CheckpointsLeftOut(checkpoints=facts.left_out, step=facts.left_out_step)))
    return notes


def _memory_note(job: Job, snapshot: ProgressSnapshot) -> Fact | None:
    """Return the note about the memory that a rank's snapshots take, if any."""
    facts, asked = snapshot.checkpoint, job.spec.resources.resources_per_worker.memory_bytes
    if facts.snapshots_off:
        return n.SnapshotsOff(said=facts.snapshots_off)
    if asked is None or facts.snapshot_bytes <= asked:
        return None
    return n.SnapshotMemory(snapshot_bytes=facts.snapshot_bytes, asked_bytes=asked)


REMEMBER_ENDED: Final = 1000


class Estimates(Protocol):
    """Time left of jobs."""

    def left(self, job_id: JobId) -> TimeLeft | None:
        """Return the time that a running job will still run."""
        ...

    def resume(self, jobs: Sequence[tuple[JobId, Path]]) -> None:
        """Read what live jobs reported to an earlier daemon. Blocks."""
        ...


class ProgressIntake:
    """Takes reports. ``jobs`` returns the live jobs; ``post`` takes the events that follow from a report.

    ``followers`` are called with every report of a live job: with its job, attempt and rank. ``remember`` ended jobs
    are kept in memory. What requests ask about earlier reports is read in ``pool``.
    """

    def __init__(
        self,
        book: ProgressTable,
        paths: Paths,
        *,
        jobs: Callable[[], Mapping[JobId, Job]],
        followers: Sequence[Callable[[Job, int, int, ProgressSnapshot], None]],
        post: Callable[[Sequence[Event]], None],
        estimates: Estimates,
        changes: Changes,
        pool: Pool,
        log: FilteringBoundLogger,
        remember: int = REMEMBER_ENDED,
    ) -> None:
        self._book = book
        self._paths = paths
        self._jobs = jobs
        self._followers = followers
        self._post = post
        self._estimates = estimates
        self._changes = changes
        self._pool = pool
        self._log = log
        self._remember = remember
        self._ended: deque[JobId] = deque()

    def take(self, job_id: JobId, attempt: int, rank: int, snapshot: ProgressSnapshot) -> None:
        """Take a rank's newest report."""
        job = self._jobs().get(job_id)
        if job is None:
            return
        for follow in self._followers:
            follow(job, attempt, rank, snapshot)
        events = self._book.take(job, attempt, rank, snapshot, self._paths.metrics(job_id))
        if any(getattr(event, "code", "") == "unusable_report" for event in events):
            self._log.warning("rank.unusable_report", job=job_id, rank=rank, fields=snapshot.unusable)
        self._changes.touch(job_id)
        if events:
            self._post(events)

    def of(self, job_id: JobId) -> JobProgress | None:
        """Return the job's newest progress, as far as it was reported or recalled."""
        return self._book.of(job_id)

    def left(self, job_id: JobId) -> TimeLeft | None:
        """Return the time that a running job will still run; None where its reports do not show it."""
        return self._estimates.left(job_id)

    async def resume(self) -> None:
        """Read what live jobs reported to an earlier daemon: their next reports continue from it."""
        begun = [(j, self._paths.metrics(j.id)) for j in self._jobs().values() if j.attempts]
        await asyncio.to_thread(self._book.resume, begun)
        await asyncio.to_thread(self._estimates.resume, [(job.id, path) for job, path in begun])

    async def recall(self, jobs: Collection[Job]) -> None:
        """Read into the book what these jobs reported to earlier daemons."""
        unknown = {j.id: self._paths.metrics(j.id) for j in jobs if not self._book.knows(j.id)}
        if unknown:
            await self._pool.run(self._book.recall, unknown)

    def ended(self, job_id: JobId) -> None:
        """Handle a job's end: write its newest report, and drop the job that ended longest ago."""
        self._book.settle(job_id, self._paths.metrics(job_id))
        self._ended.append(job_id)
        while len(self._ended) > self._remember:
            self._book.forget(self._ended.popleft())

    def settle(self) -> None:
        """Write every job's newest report, unless that was done."""
        for job_id in self._book.all():
            self._book.settle(job_id, self._paths.metrics(job_id))
