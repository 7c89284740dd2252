"""The SQL requests: the named statements of queries.sql, rows and what they hold, reads and writes on one connection.

No other module of the program holds SQL. No thread and no lock here: ``store/store.py`` has them.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import re
from collections import OrderedDict
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from orchestrator.clock import ClockReading
from orchestrator.core import events as ev
from orchestrator.core.errors import UnknownEventError
from orchestrator.core.ids import JobId
from orchestrator.core.lifecycle.fold import fold, submitted
from orchestrator.core.notices import Notice, notices_of
from orchestrator.core.states import JobState
from orchestrator.core.stored import event_body, event_from, job_from_dict, job_to_dict
from orchestrator.spec.paths import is_job_id
from orchestrator.store.errors import (
    AmbiguousJobError,
    BrokenChainError,
    IdempotencyConflictError,
    JobExistsError,
    JobNotFoundError,
    NamedByOthersError,
    UnreadableRecordError,
    VersionConflictError,
)
from orchestrator.store.records import (
    DamagedRecord,
    FinishedCount,
    Found,
    JobFilter,
    StoredEvent,
    StoredNotice,
    StoredPlace,
    StoredQueueChange,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.fold import Change

_NAMED = re.compile(r"^-- name: (?P<name>\w+)\n(?P<text>(?:(?!^-- name: ).*\n?)*)", re.MULTILINE)


def parse(text: str) -> dict[str, str]:
    """Return the statements of a file by name, without comments. Raises ValueError for a name without a comment, or used twice."""
    found: dict[str, str] = {}
    for match in _NAMED.finditer(text):
        name, lines = match["name"], match["text"].splitlines()
        if name in found or not lines or not lines[0].startswith("-- "):
            raise ValueError(f"statement {name!r}: give it a comment line of its own, and a name that is not taken")
        found[name] = "\n".join(line for line in lines if not line.startswith("--")).strip().rstrip(";")
    return found


STATEMENTS: Mapping[str, str] = parse(
    resources.files("orchestrator.store.sql").joinpath("queries.sql").read_text("utf-8")
)


PARSED_JOBS = 1024  # about 10 MB; `orch status --watch` reads the same jobs again and again
LONGEST_PARSED = 32 * 1024
"""Characters of a record that is kept: 1024 of the largest that are accepted would take some gigabytes."""


class Parsed:
    """A cache of jobs by id and version, so that an unchanged row is not parsed again. For one thread."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[tuple[str, int], Job] = OrderedDict()

    def job(self, row: tuple[str, int, str]) -> Job:
        """Return the job of a row of id, version and record."""
        key = row[:2]
        job = self._jobs.get(key)
        if job is None and len(row[2]) > LONGEST_PARSED:
            return job_of(row[2], row[0])
        if job is None:
            job = self._jobs[key] = job_of(row[2], row[0])
            if len(self._jobs) > PARSED_JOBS:
                self._jobs.popitem(last=False)
        else:
            self._jobs.move_to_end(key)
        return job


def job_row(job: Job) -> dict[str, Any]:
    """Return the columns of a job's row. ``ended_at`` is set exactly when the state is terminal."""
    return {
        "sequence": job.submission.sequence,
        "id": job.id,
        "version": job.version,
        "name": job.name,
        "user": job.submission.user,
        "uid": job.submission.uid,
        "idempotency_key": job.submission.idempotency_key,
        "state": job.state.value,
        "submitted_at": job.submission.submitted_at,
        "ended_at": job.ended_at if job.state.is_terminal else None,
        "record": _dumps(job_to_dict(job)),
        "matrix": None if job.submission.matrix is None else job.submission.matrix.matrix_id,
        "matrix_name": None if job.submission.matrix is None else job.submission.matrix.name,
    }


def job_of(record: str, job_id: str) -> Job:
    """Return the job of a row's ``record``. Raises UnreadableRecordError; also where it is another job's, or its id names no directory."""
    try:
        job = job_from_dict(_loads(record))
    except Exception as error:  # an invalid record can raise any error
        raise UnreadableRecordError(job_id, f"{type(error).__name__}: {error}") from error
    if job.id != job_id or not is_job_id(job_id):
        raise UnreadableRecordError(
            job_id, f"it is the record of {job.id!r}" if job.id != job_id else "this is no job's id"
        )
    return job


def replay(stored: Iterable[StoredEvent], sequence: int) -> Job:
    """Return the record folded from the events. Raises ValueError when they do not begin with a submission or have gaps."""
    entries = iter(stored)
    first = next(entries, None)
    if first is None or not isinstance(first.event, ev.JobSubmitted):
        raise ValueError("its events do not begin with a submission")
    job = submitted(first.event, sequence)
    for entry in entries:
        job = fold(job, entry.event)
        if job.version != entry.number:
            raise ValueError(f"event {entry.number} ({entry.event.kind}) does not follow from those before it")
    return job


def event_row(sequence: int, number: int, event: ev.Event) -> tuple[int, int, str, float, str, str]:
    """Return the columns of an event's row."""
    return sequence, number, event.kind, event.at, event.cause, _dumps(event_body(event))


def notice_row(notice: Notice) -> tuple[str, str, str, float, float]:
    """Return the columns of a new notice; it is due at once."""
    return notice.job_id, notice.url, notice.body, notice.made_at, 0.0


def notice_of(row: tuple[int, str, str, str, float, int]) -> StoredNotice:
    """Return the notice of a row of ``due_notices``."""
    number, job_id, url, body, made_at, attempts = row
    return StoredNotice(number, Notice(job_id=JobId(job_id), url=url, body=body, made_at=made_at), attempts)


def event_of(job_id: JobId, row: tuple[int, str, float, str, str]) -> StoredEvent:
    """Return the event of a row of ``events_of``. Raises UnreadableRecordError; UnknownEventError for a newer version's event."""
    number, kind, at, cause, body = row
    try:
        return StoredEvent(number, event_from(kind, _loads(body), job_id=job_id, at=at, cause=cause))
    except UnknownEventError:
        raise
    except Exception as error:  # an invalid body can raise any error
        raise UnreadableRecordError(job_id, f"event {number}: {type(error).__name__}: {error}") from error


def _dumps(value: Any) -> str:
    # ASCII only: a log line may hold half of a surrogate pair, which UTF-8 cannot.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _loads(text: str) -> Any:
    if not text.isascii():  # ``_dumps`` writes nothing else
        raise ValueError("it has bytes that are not ASCII")
    return json.loads(text)


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
        """Return the job that a reference of this user means; see ``Store.find``."""
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
        """Return the id of the matrix that a reference of this user means; see ``Store.find_matrix``."""
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


PRUNE_BATCH = 200  # jobs deleted per transaction: the transitions of running jobs wait for no more than these
_PAGES_PER_JOB = 8  # pages returned to the disk for each job; more than most jobs have


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


def submit_all(
    connection: sqlite3.Connection, events: Sequence[ev.JobSubmitted], admit: Callable[[], None]
) -> tuple[list[Job], bool]:
    """Accept the jobs of one submission, or find those that have its keys; return them, and whether they are new.

    ``admit`` raises when there is no space for new ones.
    """
    rows = [connection.execute(STATEMENTS["job_by_key"], (e.uid, e.idempotency_key)).fetchone() for e in events]
    found = one_submission(events, [None if row is None else job_of(row[2], row[0]) for row in rows])
    if found is not None:
        return found, False
    admit()
    return [_insert(connection, event) for event in events], True


def _insert(connection: sqlite3.Connection, event: ev.JobSubmitted) -> Job:
    if connection.execute(STATEMENTS["sequence_of"], (event.job_id,)).fetchone() is not None:
        raise JobExistsError(event.job_id)
    (last,) = connection.execute(STATEMENTS["last_sequence"]).fetchone()
    job = submitted(event, last + 1)
    connection.execute(STATEMENTS["insert_job"], job_row(job))
    connection.execute(STATEMENTS["insert_event"], event_row(job.submission.sequence, job.version, event))
    _write_notices(connection, notices_of(None, job, event.at))
    return job


def append(
    connection: sqlite3.Connection, batch: Sequence[JobChanges], clock: ClockReading | None = None, moved: float = 0.0
) -> None:
    """Write the changes of some jobs: their events, and the records folded from these; and a reading of the clock, ``moved`` since the last.

    Already stored changes are left as they are.
    """
    if clock is not None:
        if moved:
            connection.execute(STATEMENTS["move_notices"], (moved,))
        connection.execute(STATEMENTS["put_clock"], (clock.boot, clock.elapsed, clock.at))
    for of_job in batch:
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


def settle_notice(connection: sqlite3.Connection, number: int, again_at: float | None) -> None:
    """Delete a delivered notice, or reschedule it."""
    if again_at is None:
        connection.execute(STATEMENTS["delete_notice"], (number,))
    else:
        connection.execute(STATEMENTS["delay_notice"], (again_at, number))


def put_places(connection: sqlite3.Connection, places: Sequence[StoredPlace]) -> None:
    """Store restrictions of nodes and GPUs, or delete them: a few hundred bytes, so that a bad node stays excluded on a full disk."""
    for place in places:
        if place.body is None:
            connection.execute(STATEMENTS["delete_place"], (place.kind, place.name))
        else:
            connection.execute(STATEMENTS["put_place"], (place.kind, place.name, _dumps(place.body)))


def put_queue_change(connection: sqlite3.Connection, change: StoredQueueChange) -> None:
    """Store a change of a queue."""
    row = (change.name, _dumps(change.body), change.by, change.at)
    connection.execute(STATEMENTS["insert_queue_change"], row)


def tidied(connection: sqlite3.Connection, job_ids: Sequence[JobId]) -> None:
    """Record that jobs need no tidying any more."""
    connection.executemany(STATEMENTS["delete_untidied"], [(job_id,) for job_id in job_ids])


def prune(connection: sqlite3.Connection, older_than: float, limit: int, keep: Collection[JobId]) -> list[JobId]:
    """Delete up to ``limit`` of the jobs that ended before a time; return their ids: fewer than the limit when none are left."""
    values = (older_than, _dumps(sorted(keep)), limit)
    rows = connection.execute(STATEMENTS["ended_before"], values).fetchall()
    connection.executemany(STATEMENTS["delete_job"], [(sequence,) for sequence, _ in rows])
    (unused,) = connection.execute("PRAGMA freelist_count").fetchone()
    for _ in range(min(unused, _PAGES_PER_JOB * limit)):
        # Python executes only one step of it, whatever the number.
        connection.execute("PRAGMA incremental_vacuum(1)")
    return [job_id for _, job_id in rows]
