"""What the writer's thread does for each kind of request, and the records of live jobs that it keeps at hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from orchestrator.core.fold import submitted
from orchestrator.core.notices import notices_of
from orchestrator.store.errors import (
    IdempotencyConflictError,
    JobExistsError,
    JobNotFoundError,
    VersionConflictError,
)
from orchestrator.store.folding import finished_class, fold_batch, same_submission
from orchestrator.store.rows import event_row, job_of, job_row, notice_row
from orchestrator.store.statements import STATEMENTS

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

    from orchestrator.core import events as ev
    from orchestrator.core.ids import JobId
    from orchestrator.core.job import Job
    from orchestrator.core.notices import Notice
    from orchestrator.store.port import StoredPlace

PRUNE_BATCH = 200  # jobs forgotten per transaction: transitions of running jobs wait for no more than that
_PAGES_PER_JOB = 8  # given back to the disk; more than most jobs have


class Records:
    """Records of live jobs as the writer last wrote them, and as the open transaction leaves them.

    Saves reading back and parsing what this process wrote itself; the compare-and-swap on the version guards it. Used
    by the writer's thread alone.
    """

    def __init__(self) -> None:
        self._committed: dict[JobId, Job] = {}
        self._open: dict[JobId, Job] = {}

    def read(self, connection: sqlite3.Connection, job_id: JobId) -> Job:
        """The record inside the open transaction. Raises JobNotFoundError."""
        job = self._open.get(job_id) or self._committed.get(job_id)
        if job is not None:
            return job
        row = connection.execute(STATEMENTS["job_by_id"], (job_id,)).fetchone()
        if row is None:
            raise JobNotFoundError(job_id)
        return job_of(row[2])

    def put(self, job: Job) -> Job | None:
        """Set a record in the open transaction; what it was there before, for ``take_back``."""
        previous = self._open.get(job.id)
        self._open[job.id] = job
        return previous

    def take_back(self, job_id: JobId, previous: Job | None) -> None:
        """Undo a ``put``; the record is read again from the disk if nobody else had put it."""
        if previous is None:
            self._open.pop(job_id, None)
            self._committed.pop(job_id, None)
        else:
            self._open[job_id] = previous

    def commit(self, job_id: JobId) -> None:
        """The open transaction's record is on the disk."""
        job = self._open.pop(job_id, None)
        if job is None:
            return
        if job.state.is_terminal:
            self._committed.pop(job_id, None)
        else:
            self._committed[job_id] = job


class _Recording:
    """Work that puts records; undoing restores them."""

    essential = True
    shrinks = False

    def __init__(self, records: Records) -> None:
        self._records = records
        self._put: dict[JobId, Job | None] = {}

    def committed(self) -> None:
        """The records that were put are what is on the disk."""
        for job_id in self._put:
            self._records.commit(job_id)

    def undone(self) -> None:
        """The records are what they were before."""
        for job_id, previous in self._put.items():
            self._records.take_back(job_id, previous)
        self._put.clear()

    def _remember(self, job: Job) -> None:
        previous = self._records.put(job)
        self._put.setdefault(job.id, previous)


class Nothing:
    """A turn of the writing thread that changes nothing."""

    essential = True
    shrinks = False

    def __call__(self, connection: sqlite3.Connection) -> None:
        """Nothing."""

    def committed(self) -> None:
        """Nothing was to be kept."""

    def undone(self) -> None:
        """Nothing was done."""


class Submit(_Recording):
    """Accept a job, or find the one that its key stands for. ``admit`` raises when there is no room for a new one."""

    essential = False

    def __init__(self, records: Records, event: ev.JobSubmitted, admit: Callable[[], None]) -> None:
        super().__init__(records)
        self._event = event
        self._admit = admit

    def __call__(self, connection: sqlite3.Connection) -> tuple[Job, bool]:
        """The job, and whether it is new."""
        event = self._event
        row = connection.execute(STATEMENTS["job_by_key"], (event.uid, event.idempotency_key)).fetchone()
        if row is not None:
            job = job_of(row[0])
            if not same_submission(job, event):
                raise IdempotencyConflictError(event.idempotency_key, job.id)
            return job, False
        self._admit()
        if connection.execute(STATEMENTS["sequence_of"], (event.job_id,)).fetchone() is not None:
            raise JobExistsError(event.job_id)
        (last,) = connection.execute(STATEMENTS["last_sequence"]).fetchone()
        job = submitted(event, last + 1)
        connection.execute(STATEMENTS["insert_job"], job_row(job))
        connection.execute(STATEMENTS["insert_event"], event_row(job.sequence, job.version, event))
        _write_notices(connection, notices_of(None, job, event.at))
        self._remember(job)
        return job, True


class Append(_Recording):
    """Fold a batch of events onto its jobs."""

    def __init__(self, records: Records, events: Sequence[ev.Event]) -> None:
        super().__init__(records)
        self._events = events

    def __call__(self, connection: sqlite3.Connection) -> list[Job]:
        """The records after the batch, in order of first mention."""
        batch = fold_batch(lambda job_id: self._records.read(connection, job_id), self._events)
        for before, after in batch.changed():
            row = {**job_row(after), "read_version": before.version}
            if connection.execute(STATEMENTS["update_job"], row).rowcount != 1:
                self._remember(before)  # forget it with the undoing: what is on the disk differs
                raise VersionConflictError(after.id, before.version)
            if after.state.is_terminal and not before.state.is_terminal:
                totals = (after.spec.queue, after.state.value, finished_class(after))
                connection.execute(STATEMENTS["count_finished"], totals)
                connection.execute(STATEMENTS["insert_untidied"], (after.sequence,))
            self._remember(after)
        rows = [event_row(batch.after[w.event.job_id].sequence, w.number, w.event) for w in batch.written]
        connection.executemany(STATEMENTS["insert_event"], rows)
        _write_notices(connection, batch.notices)
        return list(batch.after.values())


def _write_notices(connection: sqlite3.Connection, notices: Sequence[Notice]) -> None:
    if notices:
        connection.executemany(STATEMENTS["insert_notice"], [notice_row(n) for n in notices])


class SettleNotice:
    """Forget a notice that was told, or put it off."""

    essential = True  # it gives room, or takes none
    shrinks = False

    def __init__(self, number: int, again_at: float | None) -> None:
        self._number = number
        self._again_at = again_at

    def __call__(self, connection: sqlite3.Connection) -> None:
        """Do it."""
        if self._again_at is None:
            connection.execute(STATEMENTS["delete_notice"], (self._number,))
        else:
            connection.execute(STATEMENTS["delay_notice"], (self._again_at, self._number))

    def committed(self) -> None:
        """Nothing is kept at hand."""

    def undone(self) -> None:
        """Nothing was kept."""


class PutPlaces:
    """Keep what is held against nodes and GPUs, or forget it."""

    essential = True  # a few hundred bytes, and a bad node must not be trusted again for want of room
    shrinks = False

    def __init__(self, places: Sequence[StoredPlace]) -> None:
        self._places = tuple(places)

    def __call__(self, connection: sqlite3.Connection) -> None:
        """Do it."""
        for place in self._places:
            if place.body is None:
                connection.execute(STATEMENTS["delete_place"], (place.kind, place.name))
            else:
                row = (place.kind, place.name, json.dumps(place.body, separators=(",", ":")))
                connection.execute(STATEMENTS["put_place"], row)

    def committed(self) -> None:
        """Nothing is kept at hand."""

    def undone(self) -> None:
        """Nothing was kept."""


class Tidied:
    """Forget that jobs are to be tidied."""

    essential = True  # it gives room
    shrinks = False

    def __init__(self, job_ids: Sequence[JobId]) -> None:
        self._job_ids = tuple(job_ids)

    def __call__(self, connection: sqlite3.Connection) -> None:
        """Do it."""
        connection.executemany(STATEMENTS["delete_untidied"], [(job_id,) for job_id in self._job_ids])

    def committed(self) -> None:
        """Nothing is kept at hand."""

    def undone(self) -> None:
        """Nothing was kept."""


class Prune:
    """Forget some of the jobs that ended before a time."""

    essential = True  # it makes room
    shrinks = True

    def __init__(self, older_than: float, limit: int) -> None:
        self._older_than = older_than
        self._limit = limit

    def __call__(self, connection: sqlite3.Connection) -> list[JobId]:
        """The ids of the jobs that are forgotten; fewer than the limit when none are left."""
        rows = connection.execute(STATEMENTS["ended_before"], (self._older_than, self._limit)).fetchall()
        connection.executemany(STATEMENTS["delete_job"], [(sequence,) for sequence, _ in rows])
        (unused,) = connection.execute("PRAGMA freelist_count").fetchone()
        for _ in range(min(unused, _PAGES_PER_JOB * self._limit)):
            connection.execute("PRAGMA incremental_vacuum(1)")  # Python takes but one step of it, whatever it is told
        return [job_id for _, job_id in rows]

    def committed(self) -> None:
        """Terminal jobs are not among the records at hand."""

    def undone(self) -> None:
        """Nothing was kept."""
