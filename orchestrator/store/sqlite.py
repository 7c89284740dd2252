"""The store in SQLite: write-ahead log, full durability, one writing thread, one reading thread.

Owns the store's file, its lock and its reserve. It decides and folds nothing: it stores the given records after
checking their versions. The rows of a job and of its events change in one transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self, TypeVar

from orchestrator.store import backup, verification
from orchestrator.store.batch import by_job
from orchestrator.store.disk import MIN_FREE_BYTES, RESERVE_BYTES, Disk
from orchestrator.store.errors import (
    DiskFullError,
    StoreClosedError,
    StoreError,
    StoreUnreadableError,
    is_damage,
    is_refused_by_disk,
    refused_by_disk,
)
from orchestrator.store.lock import StoreLock
from orchestrator.store.port import DiskTrouble
from orchestrator.store.sql.queries import Reader
from orchestrator.store.sql.schema import Migration, connect, known_migrations, prepare
from orchestrator.store.sql.work import (
    PRUNE_BATCH,
    Append,
    Nothing,
    Prune,
    PutPlaces,
    PutQueueChange,
    SettleNotice,
    SubmitAll,
    Tidied,
)
from orchestrator.store.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from orchestrator.clock import ClockReading
    from orchestrator.core import events as ev
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.fold import Change
    from orchestrator.core.states import JobState
    from orchestrator.store.port import (
        DamagedRecord,
        DiskStatus,
        FinishedCount,
        Found,
        JobFilter,
        StoredEvent,
        StoredNotice,
        StoredPlace,
        StoredQueueChange,
    )

T = TypeVar("T")

_PAGE_BYTES = 4096
_LOG_PAGES = 1000  # size of the log at which its content is moved into the file; less with a small reserve
_LOG_LIMIT_BYTES = 64 * 1024 * 1024  # the write-ahead log is truncated to this after a checkpoint; below, it is reused


class SqliteStore:
    """``port.Store`` in one SQLite file. Created by ``open``."""

    def __init__(self, path: Path, lock: StoreLock, disk: Disk, writing: sqlite3.Connection) -> None:
        self._path = path
        self._lock = lock
        self._disk = disk
        self._writer = Writer(writing, path, disk)
        self._reader = Reader(_reading(path))
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
        """Open the store at ``path``, or create it where there is none.

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

    async def submit_all(self, events: Sequence[ev.JobSubmitted]) -> tuple[list[Job], bool]:
        """Accept the jobs of one submission, all or none; see ``port.Store.submit_all``."""
        result: tuple[list[Job], bool] = await self._writer.do(SubmitAll(events, self._admit))
        return result

    async def submit(self, event: ev.JobSubmitted) -> tuple[Job, bool]:
        """Accept a job; see ``port.Store.submit``."""
        (job,), created = await self.submit_all([event])
        return job, created

    async def matrix_jobs(self, matrix_id: str) -> list[Job]:
        """Return the jobs of a matrix, reruns included, in order of arrival."""
        return await self._read(lambda: self._reader.matrix_jobs(matrix_id))

    async def find_matrix(self, reference: str, uid: int) -> str | None:
        """Return the id of the matrix that a reference of this user means; see ``port.Store.find_matrix``."""
        return await self._read(lambda: self._reader.find_matrix(reference, uid))

    async def append(self, changes: Sequence[Change], *, clock: ClockReading | None = None, moved: float = 0.0) -> None:
        """Write events and the records folded from them; see ``port.Store.append``."""
        if changes or clock is not None:
            await self._writer.do(Append(by_job(changes), clock, moved))

    async def clock(self) -> ClockReading | None:
        """Return the newest reading of the daemon's clock; None before the first."""
        return await self._read(self._reader.clock)

    async def load_live(self) -> list[Job]:
        """Return every job that is not terminal, in order of arrival."""
        return await self._read(self._reader.live)

    async def job(self, job_id: JobId) -> Job:
        """Return one job. Raises JobNotFoundError."""
        return await self._read(lambda: self._reader.job(job_id))

    async def damaged(self) -> list[DamagedRecord]:
        """Read every record; return those that are damaged."""
        return await self._aside(lambda connection: Reader(connection).damaged())

    async def archives(self) -> Mapping[str, str | None]:
        """Return the digest of each job's archive by the job's id; None where it is unknown."""
        return await self._aside(lambda connection: Reader(connection).archives())

    async def jobs(self, query: JobFilter) -> list[Job]:
        """Return the jobs that match, newest first."""
        return await self._read(lambda: self._reader.jobs(query))

    async def events(self, job_id: JobId, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """Return a job's events with numbers above ``after``, oldest first. Raises JobNotFoundError."""
        return await self._read(lambda: self._reader.events(job_id, after, limit))

    async def accepted(self, uid: int, idempotency_key: str) -> Job | None:
        """Return the job that this user submitted with this key; None without one, or for an empty key."""
        return await self._read(lambda: self._reader.accepted(uid, idempotency_key))

    async def find(self, reference: str, uid: int) -> Found:
        """Return the job that a reference of this user means; see ``port.Store.find``."""
        return await self._read(lambda: self._reader.find(reference, uid))

    async def state_counts(self) -> Mapping[JobState, int]:
        """Return the number of jobs by state, every state present."""
        return await self._read(self._reader.state_counts)

    async def finished_counts(self) -> list[FinishedCount]:
        """Return the counts of jobs that ended since the store was created; pruning does not lower them."""
        return await self._read(self._reader.finished_counts)

    async def due_notices(self, now: float, each: int) -> tuple[list[StoredNotice], float | None]:
        """Return the notices due by ``now``; see ``port.Store.due_notices``."""
        return await self._read(lambda: self._reader.due_notices(now, each))

    async def settle_notice(self, number: int, *, again_at: float | None) -> None:
        """Remove a delivered or abandoned notice, or schedule its next try."""
        await self._writer.do(SettleNotice(number, again_at))

    async def places(self) -> list[StoredPlace]:
        """Return every restriction of a node or a GPU."""
        return await self._read(self._reader.places)

    async def put_places(self, places: Sequence[StoredPlace]) -> None:
        """Store these restrictions of their places; see ``port.Store.put_places``."""
        if places:
            await self._writer.do(PutPlaces(places))

    async def queue_changes(self) -> list[StoredQueueChange]:
        """Return every change of a queue, the oldest first."""
        return await self._read(self._reader.queue_changes)

    async def put_queue_change(self, change: StoredQueueChange) -> None:
        """Store a change of a queue; see ``port.Store.put_queue_change``."""
        await self._writer.do(PutQueueChange(change))

    async def untidied(self) -> list[JobId]:
        """Return the terminal jobs whose leftovers are not yet removed, in order of arrival."""
        return await self._read(self._reader.untidied)

    async def tidied(self, job_ids: Sequence[JobId]) -> None:
        """Record that nothing is left of these jobs outside their directories."""
        if job_ids:
            await self._writer.do(Tidied(job_ids))

    async def ended_before(self, older_than: float, keep: Collection[JobId] = frozenset()) -> list[JobId]:
        """Return the terminal jobs that ended before ``older_than``, except those in ``keep``, the oldest first: what ``prune`` would delete."""
        return await self._read(lambda: self._reader.ended_before(older_than, keep))

    async def prune(self, older_than: float, keep: Collection[JobId] = frozenset()) -> list[JobId]:
        """Delete terminal jobs that ended before ``older_than``, except those in ``keep``, and give their space back to the disk."""
        forgotten: list[JobId] = []
        limit = PRUNE_BATCH
        while True:
            try:
                batch: list[JobId] = await self._writer.do(Prune(older_than, limit, keep))
            except DiskFullError:
                if limit == 1:
                    raise
                limit = max(1, limit // 8)  # deleting takes a little space before it frees any
                continue
            forgotten.extend(batch)
            if len(batch) < limit:
                self._disk.restore()
                return forgotten

    async def verify(self) -> list[str]:
        """Return the errors found in the store, one sentence each."""
        return await self._aside(verification.problems)

    async def backup(self, target: Path) -> None:
        """Write a copy of the store's current content to ``target``. Raises BackupExistsError."""
        await self._aside(lambda c: backup.write(c, target))

    async def answers(self) -> None:
        """Return once the reading and the writing thread have each completed a request."""
        await asyncio.gather(self._read(self._reader.state_counts), self._writer.do(Nothing()))

    def disk(self) -> DiskStatus:
        """Return the state of the disk; recreates the reserve when there is space for it."""
        return self._disk.status()

    def close(self) -> None:
        """Finish pending requests, then close the store. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._readers.shutdown(wait=True)
        self._long.shutdown(wait=True)
        self._reader.close()
        self._writer.close()
        self._lock.release()

    def _admit(self) -> None:
        if (trouble := self._disk.status().trouble) is not None:
            raise refused_by_disk(self._path, "so no new job is accepted", trouble)

    async def _read(self, question: Callable[[], T]) -> T:
        return await self._ask(self._readers, question)

    async def _aside(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """Run a long read that no other reader waits for."""
        return await self._ask(self._long, lambda: _with_connection(self._path, question))

    async def _ask(self, pool: ThreadPoolExecutor, question: Callable[[], T]) -> T:
        if self._closed:
            raise StoreClosedError(f"{self._path} is closed: open it again")
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, question)
        except sqlite3.Error as error:
            if is_damage(error):
                raise StoreUnreadableError(self._path, str(error)) from error
            raise StoreError(f"{self._path} could not be read ({error}): try again, or run `orch doctor`") from error


def _opened(path: Path, disk: Disk, migrations: Sequence[Migration]) -> sqlite3.Connection:
    """Open the writing connection of a checked and migrated store, with some of the reserve when the disk is full."""
    while True:
        try:
            prepare(path, migrations)
            connection = _writing(path, disk.reserve_bytes)
        except (sqlite3.Error, OSError) as error:
            trouble = disk.trouble()  # SQLite says of a disk without inodes only that it cannot open a file
            full = is_refused_by_disk(error) or disk.free_bytes() < disk.reserve_bytes
            if full and trouble in (None, DiskTrouble.FULL) and disk.give_up_piece():
                continue
            if full or trouble is not None:
                raise refused_by_disk(path, "so the store cannot be opened", trouble or DiskTrouble.FULL) from error
            if isinstance(error, sqlite3.DatabaseError):
                raise StoreUnreadableError(path, str(error)) from error
            raise
        disk.hold_again(path, path.with_name(path.name + "-wal"), path.stat().st_size)
        return connection


def _writing(path: Path, reserve_bytes: int) -> sqlite3.Connection:
    connection = connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # On a full disk half of the reserve must suffice for the file to take in the log's content.
        connection.execute(f"PRAGMA wal_autocheckpoint = {max(1, min(_LOG_PAGES, reserve_bytes // 2 // _PAGE_BYTES))}")
        connection.execute(f"PRAGMA journal_size_limit = {_LOG_LIMIT_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def _with_connection(path: Path, question: Callable[[sqlite3.Connection], T]) -> T:
    with contextlib.closing(_reading(path)) as connection:
        return question(connection)


def _reading(path: Path) -> sqlite3.Connection:
    connection = connect(path)
    connection.execute("PRAGMA query_only = ON")
    return connection
