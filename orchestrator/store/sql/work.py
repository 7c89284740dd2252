"""The work of the writer's thread for each kind of request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from orchestrator.core.lifecycle.fold import submitted
from orchestrator.core.notices import notices_of
from orchestrator.store.batch import finished_class, one_submission
from orchestrator.store.errors import (
    JobExistsError,
    JobNotFoundError,
    VersionConflictError,
)
from orchestrator.store.sql.rows import event_row, job_of, job_row, notice_row
from orchestrator.store.sql.statements import STATEMENTS

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Collection, Sequence

    from orchestrator.clock import ClockReading
    from orchestrator.core import events as ev
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.notices import Notice
    from orchestrator.store.batch import JobChanges
    from orchestrator.store.port import StoredPlace, StoredQueueChange

PRUNE_BATCH = 200  # jobs deleted per transaction: the transitions of running jobs wait for no more than these
_PAGES_PER_JOB = 8  # pages returned to the disk for each job; more than most jobs have


class Nothing:
    """A request to the writing thread that changes nothing."""

    essential = True
    shrinks = False

    def __call__(self, connection: sqlite3.Connection) -> None:
        """Do nothing."""


class SubmitAll:
    """Accept the jobs of one submission, or find those that have its keys. ``admit`` raises when there is no space for new ones."""

    essential = False
    shrinks = False

    def __init__(self, events: Sequence[ev.JobSubmitted], admit: Callable[[], None]) -> None:
        self._events = events
        self._admit = admit

    def __call__(self, connection: sqlite3.Connection) -> tuple[list[Job], bool]:
        """Return the jobs, and whether they are new."""
        known = [_known(connection, event) for event in self._events]
        found = one_submission(self._events, known)
        if found is not None:
            return found, False
        self._admit()
        return [_insert(connection, event) for event in self._events], True


def _known(connection: sqlite3.Connection, event: ev.JobSubmitted) -> Job | None:
    row = connection.execute(STATEMENTS["job_by_key"], (event.uid, event.idempotency_key)).fetchone()
    return None if row is None else job_of(row[2], row[0])


def _insert(connection: sqlite3.Connection, event: ev.JobSubmitted) -> Job:
    if connection.execute(STATEMENTS["sequence_of"], (event.job_id,)).fetchone() is not None:
        raise JobExistsError(event.job_id)
    (last,) = connection.execute(STATEMENTS["last_sequence"]).fetchone()
    job = submitted(event, last + 1)
    connection.execute(STATEMENTS["insert_job"], job_row(job))
    connection.execute(STATEMENTS["insert_event"], event_row(job.submission.sequence, job.version, event))
    _write_notices(connection, notices_of(None, job, event.at))
    return job


class Append:
    """Write the changes of some jobs: their events, and the records folded from these; and a reading of the clock, ``moved`` since the last."""

    essential = True
    shrinks = False

    def __init__(self, batch: Sequence[JobChanges], clock: ClockReading | None = None, moved: float = 0.0) -> None:
        self._batch, self._clock, self._moved = batch, clock, moved

    def __call__(self, connection: sqlite3.Connection) -> None:
        """Write the changes; already stored ones are left as they are."""
        if self._clock is not None:
            if self._moved:
                connection.execute(STATEMENTS["move_notices"], (self._moved,))
            connection.execute(STATEMENTS["put_clock"], (self._clock.boot, self._clock.elapsed, self._clock.at))
        for of_job in self._batch:
            if not _write_record(connection, of_job):
                continue
            after = of_job.after
            if of_job.ends:
                totals = (after.spec.queue, after.state.value, finished_class(after))
                connection.execute(STATEMENTS["count_finished"], totals)
                connection.execute(STATEMENTS["insert_untidied"], (after.submission.sequence,))
            rows = [event_row(after.submission.sequence, c.after.version, c.event) for c in of_job.changes]
            connection.executemany(STATEMENTS["insert_event"], rows)
            _write_notices(connection, of_job.notices())


def _write_record(connection: sqlite3.Connection, of_job: JobChanges) -> bool:
    """Replace the record if it has the version before the changes; False when it is already the new one."""
    version = of_job.before.version
    row = {**job_row(of_job.after), "read_version": version}
    if connection.execute(STATEMENTS["update_job"], row).rowcount == 1:
        return True
    stored = connection.execute(STATEMENTS["job_by_id"], (of_job.before.id,)).fetchone()
    if stored is None:
        raise JobNotFoundError(of_job.before.id)
    if stored[1:3] != (row["version"], row["record"]):
        raise VersionConflictError(of_job.before.id, version)
    return False


def _write_notices(connection: sqlite3.Connection, notices: Sequence[Notice]) -> None:
    if notices:
        connection.executemany(STATEMENTS["insert_notice"], [notice_row(n) for n in notices])


class SettleNotice:
    """Delete a delivered notice, or reschedule it."""

    essential = True  # it frees space, or takes none
    shrinks = False

    def __init__(self, number: int, again_at: float | None) -> None:
        self._number = number
        self._again_at = again_at

    def __call__(self, connection: sqlite3.Connection) -> None:
        """Run the statement."""
        if self._again_at is None:
            connection.execute(STATEMENTS["delete_notice"], (self._number,))
        else:
            connection.execute(STATEMENTS["delay_notice"], (self._again_at, self._number))


class PutPlaces:
    """Store restrictions of nodes and GPUs, or delete them."""

    essential = True  # a few hundred bytes; a bad node must stay excluded even on a full disk
    shrinks = False

    def __init__(self, places: Sequence[StoredPlace]) -> None:
        self._places = tuple(places)

    def __call__(self, connection: sqlite3.Connection) -> None:
        """Run the statements."""
        for place in self._places:
            if place.body is None:
                connection.execute(STATEMENTS["delete_place"], (place.kind, place.name))
            else:
                row = (place.kind, place.name, json.dumps(place.body, separators=(",", ":")))
                connection.execute(STATEMENTS["put_place"], row)


class PutQueueChange:
    """Store a change of a queue."""

    essential = False  # the user gets the error when there is no space
    shrinks = False

    def __init__(self, change: StoredQueueChange) -> None:
        self._change = change

    def __call__(self, connection: sqlite3.Connection) -> None:
        """Run the statement."""
        change = self._change
        body = json.dumps(change.body, separators=(",", ":"))
        connection.execute(STATEMENTS["insert_queue_change"], (change.name, body, change.by, change.at))


class Tidied:
    """Record that jobs need no tidying any more."""

    essential = True  # it frees space
    shrinks = False

    def __init__(self, job_ids: Sequence[JobId]) -> None:
        self._job_ids = tuple(job_ids)

    def __call__(self, connection: sqlite3.Connection) -> None:
        """Run the statements."""
        connection.executemany(STATEMENTS["delete_untidied"], [(job_id,) for job_id in self._job_ids])


class Prune:
    """Delete some of the jobs that ended before a time."""

    essential = True  # it frees space
    shrinks = True

    def __init__(self, older_than: float, limit: int, keep: Collection[JobId]) -> None:
        self._older_than = older_than
        self._limit = limit
        self._keep = json.dumps(sorted(keep))

    def __call__(self, connection: sqlite3.Connection) -> list[JobId]:
        """Return the ids of the deleted jobs; fewer than the limit when none are left."""
        rows = connection.execute(STATEMENTS["ended_before"], (self._older_than, self._keep, self._limit)).fetchall()
        connection.executemany(STATEMENTS["delete_job"], [(sequence,) for sequence, _ in rows])
        (unused,) = connection.execute("PRAGMA freelist_count").fetchone()
        for _ in range(min(unused, _PAGES_PER_JOB * self._limit)):
            connection.execute(
                "PRAGMA incremental_vacuum(1)"
            )  # Python executes only one step of it, whatever the number
        return [job_id for _, job_id in rows]
