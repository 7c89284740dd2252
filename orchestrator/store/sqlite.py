"""The durable record in SQLite: write-ahead log, full durability, one writing thread, one reading thread.

Owns the store's file, its lock and its reserve. It decides nothing about jobs: it folds with the core's ``fold`` and
keeps what comes out. The rows of a job and of its events change in one transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self, TypeVar

from orchestrator.core.states import JobState
from orchestrator.store import backup, verification
from orchestrator.store.disk import MIN_FREE_BYTES, RESERVE_BYTES, Disk
from orchestrator.store.errors import (
    AmbiguousJobError,
    DiskFullError,
    JobNotFoundError,
    StoreClosedError,
    StoreError,
    StoreUnreadableError,
)
from orchestrator.store.lock import StoreLock
from orchestrator.store.port import DiskStatus, FinishedCount, Found, JobFilter, StoredEvent
from orchestrator.store.rows import event_of, job_of
from orchestrator.store.schema import Migration, connect, known_migrations, prepare
from orchestrator.store.statements import STATEMENTS
from orchestrator.store.work import PRUNE_BATCH, Append, Prune, Records, Submit
from orchestrator.store.writer import Writer, is_damage, is_disk_full

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from orchestrator.core import events as ev
    from orchestrator.core.ids import JobId
    from orchestrator.core.job import Job

T = TypeVar("T")

_MAX_SEQUENCE = 2**62
_LOG_LIMIT_BYTES = 64 * 1024 * 1024  # the write-ahead log is cut back to this after a checkpoint; below, it is reused


class SqliteStore:
    """``port.Store`` in one SQLite file. Made by ``open``."""

    def __init__(self, path: Path, lock: StoreLock, disk: Disk, writing: sqlite3.Connection) -> None:
        self._path = path
        self._lock = lock
        self._disk = disk
        self._records = Records()
        self._writer = Writer(writing, path, disk)
        self._reading = connect(path)
        self._reading.execute("PRAGMA query_only = ON")
        self._readers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-reader")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-long")
        self._closed = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        reserve: Path | None,
        reserve_bytes: int = RESERVE_BYTES,
        min_free_bytes: int = MIN_FREE_BYTES,
        migrations: Sequence[Migration] | None = None,
    ) -> Self:
        """Open the store at ``path``, or make it where there is nothing.

        ``reserve`` is a file of ``reserve_bytes`` kept for transitions on a full disk; below ``min_free_bytes`` no new
        job is accepted. Raises StoreInUseError, StoreTooNewError, StoreUnreadableError (nothing is changed then), and
        DiskFullError.
        """
        lock = StoreLock(path)
        try:
            disk = Disk(path, reserve=reserve, reserve_bytes=reserve_bytes, min_free_bytes=min_free_bytes)
            writing = _opened(path, disk, known_migrations() if migrations is None else migrations)
            return cls(path, lock, disk, writing)
        except BaseException:
            lock.release()
            raise

    async def submit(self, event: ev.JobSubmitted) -> tuple[Job, bool]:
        """Accept a job; see ``port.Store.submit``."""
        result: tuple[Job, bool] = await self._writer.do(Submit(self._records, event, self._admit))
        return result

    async def append(self, events: Sequence[ev.Event]) -> list[Job]:
        """Fold events onto their jobs; see ``port.Store.append``."""
        if not events:
            return []
        result: list[Job] = await self._writer.do(Append(self._records, tuple(events)))
        return result

    async def load_live(self) -> list[Job]:
        """Every job that is not terminal, in order of arrival."""
        return await self._read(lambda c: [job_of(record) for (record,) in c.execute(STATEMENTS["live_jobs"])])

    async def job(self, job_id: JobId) -> Job:
        """One job. Raises JobNotFoundError."""
        return await self._read(lambda c: _job(c, job_id))

    async def jobs(self, query: JobFilter) -> list[Job]:
        """Jobs that match, newest first."""
        return await self._read(lambda c: [job_of(record) for record in _select(c, query)])

    async def events(self, job_id: JobId, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """Events of a job with numbers above ``after``, oldest first. Raises JobNotFoundError."""
        return await self._read(lambda c: _events(c, job_id, after, limit))

    async def find(self, reference: str) -> Found:
        """The job that a reference means; see ``port.Store.find``."""
        return await self._read(lambda c: _find(c, reference))

    async def state_counts(self) -> Mapping[JobState, int]:
        """Jobs by state, every state present."""
        rows = await self._read(lambda c: c.execute(STATEMENTS["count_states"]).fetchall())
        found = {JobState(state): int(count) for state, count in rows}
        return {state: found.get(state, 0) for state in JobState}

    async def finished_counts(self) -> list[FinishedCount]:
        """Jobs that ended since the store was made; pruning does not lower them."""
        rows = await self._read(lambda c: c.execute(STATEMENTS["finished_counts"]).fetchall())
        return [FinishedCount(queue, JobState(state), kind, count) for queue, state, kind, count in rows]

    async def prune(self, older_than: float) -> list[JobId]:
        """Forget terminal jobs that ended before ``older_than``, and give their space back to the disk."""
        forgotten: list[JobId] = []
        while True:
            batch: list[JobId] = await self._writer.do(Prune(older_than))
            forgotten.extend(batch)
            if len(batch) < PRUNE_BATCH:
                break
        if forgotten:
            await self._read(_shrink)
        self._disk.restore()
        return forgotten

    async def verify(self) -> list[str]:
        """What is wrong with the record, one sentence each."""
        return await self._aside(verification.problems)

    async def backup(self, target: Path) -> None:
        """Write a copy of the store as it is now to ``target``. Raises BackupExistsError."""
        await self._aside(lambda c: backup.write(c, target))

    def disk(self) -> DiskStatus:
        """How the disk stands; makes the reserve again when there is space for it."""
        return self._disk.status()

    def close(self) -> None:
        """Finish what was asked, then let go of the store. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._readers.shutdown(wait=True)
        self._long.shutdown(wait=True)
        self._reading.close()
        self._writer.close()
        self._lock.release()

    def _admit(self) -> None:
        if not self._disk.status().accepts_submissions:
            raise DiskFullError(self._path, "so no new job is accepted")

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return await self._ask(self._readers, lambda: query(self._reading))

    async def _aside(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Something long, which no other reader waits for."""
        return await self._ask(self._long, lambda: _with_connection(self._path, query))

    async def _ask(self, pool: ThreadPoolExecutor, question: Callable[[], T]) -> T:
        if self._closed:
            raise StoreClosedError(f"{self._path} is closed: open it again")
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, question)
        except sqlite3.Error as error:
            if is_damage(error):
                raise StoreUnreadableError(self._path, str(error)) from error
            raise StoreError(f"{self._path} could not be read ({error}): ask again, or run `orch doctor`") from error


def _opened(path: Path, disk: Disk, migrations: Sequence[Migration]) -> sqlite3.Connection:
    """The writing connection of a store that is checked and up to date; with the reserve when the disk is full."""
    for attempt in itertools.count():
        try:
            prepare(path, migrations)
            return _writing(path)
        except (sqlite3.Error, OSError) as error:
            full = is_disk_full(error) or disk.free_bytes() < disk.reserve_bytes
            if attempt == 0 and full and disk.give_up_reserve(path.with_name(path.name + "-wal")):
                continue
            if full:
                raise DiskFullError(path, "so the store cannot be opened") from error
            if isinstance(error, sqlite3.DatabaseError):
                raise StoreUnreadableError(path, str(error)) from error
            raise
    raise AssertionError  # the loop ends above


def _writing(path: Path) -> sqlite3.Connection:
    connection = connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA journal_size_limit = {_LOG_LIMIT_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def _with_connection(path: Path, query: Callable[[sqlite3.Connection], T]) -> T:
    with contextlib.closing(connect(path)) as connection:
        connection.execute("PRAGMA query_only = ON")
        return query(connection)


def _shrink(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _job(connection: sqlite3.Connection, job_id: str) -> Job:
    row = connection.execute(STATEMENTS["job_by_id"], (job_id,)).fetchone()
    if row is None:
        raise JobNotFoundError(job_id)
    return job_of(row[0])


def _events(connection: sqlite3.Connection, job_id: JobId, after: int, limit: int) -> list[StoredEvent]:
    row = connection.execute(STATEMENTS["sequence_of"], (job_id,)).fetchone()
    if row is None:
        raise JobNotFoundError(job_id)
    return [event_of(job_id, r) for r in connection.execute(STATEMENTS["events_of"], (row[0], after, limit))]


def _select(connection: sqlite3.Connection, query: JobFilter) -> list[str]:
    first: int | None = 0
    if query.since is not None:
        (first,) = connection.execute(STATEMENTS["first_since"], (query.since,)).fetchone()
        if first is None:
            return []
    values: dict[str, Any] = {
        "user": query.user,
        "first": first,
        "before": _MAX_SEQUENCE if query.before is None else query.before,
        "since": float("-inf") if query.since is None else query.since,
        "limit": query.limit,
    }
    if query.states:
        found = [connection.execute(STATEMENTS["select_jobs_in_state"], {**values, "state": s}) for s in query.states]
        merged = heapq.merge(*found, key=lambda row: int(row[0]), reverse=True)
        return [record for _, record in itertools.islice(merged, query.limit)]
    name = "select_jobs" if query.user is None else "select_jobs_of_user"
    return [record for _, record in connection.execute(STATEMENTS[name], values)]


def _find(connection: sqlite3.Connection, reference: str) -> Found:
    with contextlib.suppress(JobNotFoundError):
        return Found(_job(connection, reference), "id")
    row = connection.execute(STATEMENTS["newest_by_name"], (reference,)).fetchone()
    if row is not None:
        (count,) = connection.execute(STATEMENTS["count_by_name"], (reference,)).fetchone()
        return Found(job_of(row[0]), "name", count - 1)
    if not reference:
        raise JobNotFoundError(reference)
    end = reference[:-1] + chr(ord(reference[-1]) + 1)
    ids = [row[0] for row in connection.execute(STATEMENTS["ids_by_prefix"], (reference, end))]
    if len(ids) > 1:
        raise AmbiguousJobError(reference, ids)
    if not ids:
        raise JobNotFoundError(reference)
    return Found(_job(connection, ids[0]), "prefix")
