"""The store's queries, each on one connection and in one thread."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
from typing import TYPE_CHECKING, Any

from orchestrator.clock import ClockReading
from orchestrator.core.ids import JobId
from orchestrator.core.states import JobState
from orchestrator.spec.paths import is_job_id
from orchestrator.store.errors import (
    AmbiguousJobError,
    JobNotFoundError,
    NamedByOthersError,
    UnreadableRecordError,
)
from orchestrator.store.port import (
    DamagedRecord,
    FinishedCount,
    Found,
    JobFilter,
    StoredEvent,
    StoredNotice,
    StoredPlace,
    StoredQueueChange,
)
from orchestrator.store.sql.rows import Parsed, event_of, job_of, notice_of, replay
from orchestrator.store.sql.statements import STATEMENTS

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterable, Iterator

    from orchestrator.core.job.record import Job

_PAGE = 500
_BEYOND = 2**62  # above every sequence
_NO_UID = -1


class Reader:
    """Reads through ``connection``, and caches the jobs that it read last."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._parsed = Parsed()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def live(self) -> list[Job]:
        """Return every job that is not terminal, in order of arrival."""
        return self._readable(self._connection.execute(STATEMENTS["live_jobs"]))

    def job(self, job_id: str) -> Job:
        """Return one job. Raises JobNotFoundError."""
        row = self._connection.execute(STATEMENTS["job_by_id"], (job_id,)).fetchone()
        if row is None:
            raise JobNotFoundError(job_id)
        return self._job(row)

    def _job(self, row: tuple[str, int, str]) -> Job:
        """Return the job of a row of id, version and record; from its events where the record is damaged. Raises UnreadableRecordError."""
        try:
            return self._parsed.job(row)
        except UnreadableRecordError as error:
            return self._rebuilt(row[0], row[1], error)

    def _rebuilt(self, job_id: str, version: int, error: UnreadableRecordError) -> Job:
        try:
            (sequence,) = self._connection.execute(STATEMENTS["sequence_of"], (job_id,)).fetchone()
            rows = self._connection.execute(STATEMENTS["events_of"], (sequence, 0, -1))
            job = replay((event_of(JobId(job_id), row) for row in rows), sequence)
        except Exception:  # an invalid event can raise any error
            raise error from None
        if not is_job_id(job.id) or job.version != version:
            raise error
        return job

    def _readable(self, rows: Iterable[tuple[str, int, str]]) -> list[Job]:
        """Return the jobs of the rows without those that are set aside."""
        found = []
        for row in rows:
            with contextlib.suppress(UnreadableRecordError):
                found.append(self._job(row))
        return found

    def damaged(self) -> list[DamagedRecord]:
        """Read every record; return those that are damaged."""
        found, last = list[DamagedRecord](), 0
        while page := self._connection.execute(STATEMENTS["records_after"], (last, _PAGE)).fetchall():
            for _, job_id, version, record in page:
                try:
                    job_of(record, job_id)
                except UnreadableRecordError as error:
                    try:
                        self._rebuilt(job_id, version, error)
                    except UnreadableRecordError:
                        found.append(DamagedRecord(job_id, str(error), rebuilt=False))
                    else:
                        found.append(DamagedRecord(job_id, str(error), rebuilt=True))
            last = page[-1][0]
        return found

    def archives(self) -> dict[str, str | None]:
        """Return the digest of each job's archive by the job's id; None where it is unknown."""
        return dict(self._connection.execute(STATEMENTS["archives"]).fetchall())

    def jobs(self, query: JobFilter) -> list[Job]:
        """Return the jobs that match, newest first."""
        values: dict[str, Any] = {
            "user": query.user,
            "first": 0,
            "before": _BEYOND if query.before is None else query.before,
            "since": float("-inf") if query.since is None else query.since,
            "limit": query.limit,
        }
        if query.since is not None:
            (values["first"],) = self._connection.execute(STATEMENTS["first_since"], (query.since,)).fetchone()
        if not query.states:
            name = "select_jobs" if query.user is None else "select_jobs_of_user"
            return self._readable(row[1:] for row in self._connection.execute(STATEMENTS[name], values))
        found = [
            self._connection.execute(STATEMENTS["select_jobs_in_state"], {**values, "state": state})
            for state in query.states
        ]
        merged = heapq.merge(*found, key=lambda row: int(row[0]), reverse=True)
        return self._readable(row[1:] for row in itertools.islice(merged, query.limit))

    def events(self, job_id: JobId, after: int, limit: int) -> list[StoredEvent]:
        """Return a job's events with numbers above ``after``, oldest first. Raises JobNotFoundError."""
        row = self._connection.execute(STATEMENTS["sequence_of"], (job_id,)).fetchone()
        if row is None:
            raise JobNotFoundError(job_id)
        return [event_of(job_id, r) for r in self._connection.execute(STATEMENTS["events_of"], (row[0], after, limit))]

    def accepted(self, uid: int, idempotency_key: str) -> Job | None:
        """Return the job that this user submitted with this key; None without one."""
        row = self._connection.execute(STATEMENTS["job_by_key"], (uid, idempotency_key)).fetchone()
        return None if row is None else self._job(row)

    def find(self, reference: str, uid: int) -> Found:
        """Return the job that a reference of this user means; see ``port.Store.find``."""
        row = self._connection.execute(STATEMENTS["job_by_id"], (reference,)).fetchone()
        if row is not None:
            return Found(self._job(row), "id")
        named = self._named(reference, uid)
        row = self._connection.execute(STATEMENTS["newest_by_name"], named).fetchone()
        if row is not None:
            (count,) = self._connection.execute(STATEMENTS["count_by_name"], named).fetchone()
            return Found(self._job(row), "name", count - 1)
        self._refuse_names_of_others(reference, uid)
        return Found(self.job(self._only_id_with(reference)), "prefix")

    def state_counts(self) -> dict[JobState, int]:
        """Return the number of jobs by state, every state present."""
        found = dict(self._connection.execute(STATEMENTS["count_states"]).fetchall())
        return {state: found.get(state.value, 0) for state in JobState}

    def clock(self) -> ClockReading | None:
        """Return the newest reading of the daemon's clock."""
        row = self._connection.execute(STATEMENTS["clock"]).fetchone()
        return None if row is None else ClockReading(*row)

    def places(self) -> list[StoredPlace]:
        """Return every restriction of a node or a GPU."""
        rows = _sound(self._connection.execute(STATEMENTS["all_places"]), 2)
        return [StoredPlace(kind=kind, name=name, body=body) for kind, name, body in rows]

    def queue_changes(self) -> list[StoredQueueChange]:
        """Return every change of a queue, the oldest first."""
        rows = _sound(self._connection.execute(STATEMENTS["all_queue_changes"]), 1)
        return [StoredQueueChange(name=name, body=body, by=by, at=at) for name, body, by, at in rows]

    def due_notices(self, now: float, each: int) -> tuple[list[StoredNotice], float | None]:
        """Return the notices due by ``now``, and when the next one becomes due."""
        due = [notice_of(row) for row in self._connection.execute(STATEMENTS["due_notices"], (now, each))]
        (later,) = self._connection.execute(STATEMENTS["next_notice"], (now,)).fetchone()
        return due, later

    def finished_counts(self) -> list[FinishedCount]:
        """Return the counts of jobs that ended since the store was created."""
        rows = self._connection.execute(STATEMENTS["finished_counts"])
        known = set(JobState)
        return [
            FinishedCount(queue, JobState(state), kind, count) for queue, state, kind, count in rows if state in known
        ]

    def untidied(self) -> list[JobId]:
        """Return the terminal jobs whose leftovers are not yet removed, in order of arrival."""
        return [job_id for (job_id,) in self._connection.execute(STATEMENTS["all_untidied"])]

    def ended_before(self, older_than: float, keep: Collection[JobId]) -> list[JobId]:
        """Return the terminal jobs that ended before ``older_than``, except those in ``keep``, the oldest first."""
        values = (older_than, json.dumps(sorted(keep)), -1)
        return [job_id for _, job_id in self._connection.execute(STATEMENTS["ended_before"], values)]

    def matrix_jobs(self, matrix_id: str) -> list[Job]:
        """Return the jobs of a matrix, reruns included, in order of arrival."""
        return self._readable(self._connection.execute(STATEMENTS["jobs_of_matrix"], (matrix_id,)))

    def find_matrix(self, reference: str, uid: int) -> str | None:
        """Return the id of the matrix that a reference of this user means; see ``port.Store.find_matrix``."""
        if self._connection.execute(STATEMENTS["jobs_of_matrix"], (reference,)).fetchone() is not None:
            return reference
        if self._connection.execute(STATEMENTS["job_by_id"], (reference,)).fetchone() is not None:
            return None
        whose = self._named(reference, uid)
        named = self._connection.execute(STATEMENTS["newest_of_matrix_name"], whose).fetchone()
        job = self._connection.execute(STATEMENTS["newest_place_by_name"], whose).fetchone()
        if named is not None or job is not None:
            newer = named is not None and (job is None or named[0] >= job[0])
            return str(named[1]) if newer else None
        self._refuse_names_of_others(reference, uid)
        return self._only_matrix_with(reference)

    def _only_matrix_with(self, prefix: str) -> str | None:
        if not prefix or self._connection.execute(STATEMENTS["ids_by_prefix"], id_range(prefix)).fetchone() is not None:
            return None
        ids: list[str] = [
            row[0] for row in self._connection.execute(STATEMENTS["matrices_by_prefix"], id_range(prefix))
        ]
        if len(ids) > 1:
            raise AmbiguousJobError(prefix, ids)
        return ids[0] if ids else None

    def _named(self, reference: str, uid: int) -> tuple[str, int]:
        """Return the name in a reference, and the user whose job it is: the one before its slash, or ``uid``."""
        user, slash, name = reference.rpartition("/")
        if slash:
            row = self._connection.execute(STATEMENTS["uid_of_user"], (user,)).fetchone()
            uid = _NO_UID if row is None else row[0]
        return name, uid

    def _refuse_names_of_others(self, name: str, own: int) -> None:
        """Raise NamedByOthersError if only users other than ``own`` have jobs or matrices of this name."""
        found: dict[int, tuple[int, str, str]] = {}  # the newest of each user: its place, its user's name, its id
        for users, newest in (
            (STATEMENTS["uids_by_name"], STATEMENTS["newest_place_by_name"]),
            (STATEMENTS["uids_by_matrix_name"], STATEMENTS["newest_of_matrix_name"]),
        ):
            for (uid,) in self._connection.execute(users, (name,)).fetchall():
                place, row_id, user = self._connection.execute(newest, (name, uid)).fetchone()
                if uid not in found or place >= found[uid][0]:
                    found[uid] = (place, user, row_id)
        if found and own not in found:
            raise NamedByOthersError(name, [(user, row_id) for _, user, row_id in sorted(found.values(), reverse=True)])

    def _only_id_with(self, prefix: str) -> str:
        if not prefix:
            raise JobNotFoundError(prefix)
        ids: list[str] = [row[0] for row in self._connection.execute(STATEMENTS["ids_by_prefix"], id_range(prefix))]
        if len(ids) > 1:
            raise AmbiguousJobError(prefix, ids)
        if not ids:
            raise JobNotFoundError(prefix)
        return ids[0]


def _sound(rows: Iterable[tuple[Any, ...]], column: int) -> Iterator[tuple[Any, ...]]:
    """Yield the rows with their JSON of an object in ``column`` read, without those in which it is damaged: `verify` reports them."""
    for row in rows:
        try:
            body = json.loads(row[column])
        except (ValueError, TypeError):
            continue
        if isinstance(body, dict):
            yield (*row[:column], body, *row[column + 1 :])


def id_range(prefix: str) -> tuple[str, str]:
    """Return the range from the prefix to an end above every id with the prefix."""
    return prefix, prefix[:-1] + chr(min(ord(prefix[-1]) + 1, 0x10FFFF))
