"""The store: one SQLite file, write-ahead log, full durability, one writing thread, one reading thread. The only durable record.

Owns the file, its lock and its reserve. It decides and folds nothing: it stores the given records after checking their
versions. The rows of a job and of its events change in one transaction. Writes are committed in groups: requests that
arrive during a commit share the next one, each in a savepoint of its own, so that a failed one does not affect the
others. A request is answered after the commit that holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from orchestrator.core import events as ev
from orchestrator.core.lifecycle.fold import fold, submitted
from orchestrator.store import backup, verification
from orchestrator.store.disk import MIN_FREE_BYTES, RESERVE_BYTES, Disk
from orchestrator.store.errors import (
    DiskFullError,
    OutcomeUnknownError,
    StoreClosedError,
    StoreError,
    StoreUnreadableError,
    is_cut_short,
    is_damage,
    is_refused_by_disk,
    refused_by_disk,
)
from orchestrator.store.lock import StoreLock
from orchestrator.store.records import DiskTrouble
from orchestrator.store.sql.requests import (
    PRUNE_BATCH,
    Reader,
    append,
    by_job,
    prune,
    put_places,
    put_queue_change,
    settle_notice,
    submit_all,
    tidied,
)
from orchestrator.store.sql.schema import Migration, connect, known_migrations, prepare

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from orchestrator.clock import ClockReading
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.fold import Change
    from orchestrator.core.states import JobState
    from orchestrator.store.records import (
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

WIPE_TRIES = 3
PAGE_EVENTS = 1000
MAX_GROUP = 256  # bounds how long the first of a group waits for the work of the last


@dataclass(slots=True)
class _Request:
    """A request to the writing thread, and its outcome."""

    work: Callable[[sqlite3.Connection], Any]
    """Its work inside the transaction; the result answers it. Called again after a rollback."""
    essential: bool
    """Whether it may use the reserve, as a transition of an accepted job may."""
    shrinks: bool
    """Whether it leaves free space in the file, which is returned to the disk."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


class Writer:
    """The only thread that writes, and its connection: transactions, and what to do on a full disk. The requests define their own work."""

    def __init__(self, connection: sqlite3.Connection, path: Path, disk: Disk) -> None:
        self._connection = connection
        self._path = path
        self._log = path.with_name(path.name + "-wal")
        self._disk = disk
        self._doubtful = (
            False  # the log may hold a transaction whose requests were not answered, after a commit that failed
        )
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    async def do(self, work: Callable[[sqlite3.Connection], T], *, essential: bool = True, shrinks: bool = False) -> T:
        """Queue ``work`` and wait for its commit. Raises its error, and errors of the store."""
        loop = asyncio.get_running_loop()
        request = _Request(work, essential, shrinks, loop, loop.create_future())
        with self._closing:
            if self._closed:
                raise StoreClosedError(f"{self._path} is closed: open it again")
            self._requests.put(request)
        result: T = await request.future
        return result

    def close(self) -> None:
        """Finish queued work, then end the thread and close the connection. May be called twice."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._requests.put(None)
        self._thread.join()
        if self._disk.is_spent:
            with contextlib.suppress(sqlite3.Error):  # a damaged store
                self._disk.keep_blocks(self._path, self._log, self._used_bytes())
        self._connection.close()

    def _run(self) -> None:
        while (first := self._requests.get()) is not None:
            group = [first]
            last = False
            while len(group) < MAX_GROUP and not last:
                try:
                    following = self._requests.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    last = True
                else:
                    group.append(following)
            self._commit(group)
            if any(r.shrinks and r.error is None for r in group):
                self._shrink()
            _answer(group)
            if last:
                return

    def _commit(self, group: list[_Request]) -> None:
        """Commit a group; on a full disk, refuse the requests that are not essential, then use the reserve."""
        try:
            if self._committed(group):
                return
            trouble = self._disk.trouble() or DiskTrouble.FULL  # by a limit on the file, or until a moment ago
            essential = [r for r in group if r.essential]
            written = bool(essential) and (self._committed(essential) or self._make_room(essential))
            gone = written or not self._doubtful or self._wipe()
            for request in group:
                what = "so nothing new is accepted"
                if request.essential:
                    if written:
                        continue
                    what = "not even the record of a running job can be written"
                request.error = refused_by_disk(self._path, what, trouble) if gone else OutcomeUnknownError(self._path)
        except Exception as error:  # a group that cannot be committed fails as a whole, and the thread continues
            gone = not self._doubtful or self._wipe()
            for request in group:
                request.error = self._translated(error) if gone else OutcomeUnknownError(self._path)

    def _wipe(self) -> bool:
        """Overwrite in the log what a failed commit may have left there; return whether that is on disk.

        A commit that fails at its fsync has written all its frames: the next daemon would find them, and take the refused requests
        for accepted ones. The next transaction is written over them.
        """
        for _ in range(WIPE_TRIES):
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                (version,) = self._connection.execute("PRAGMA user_version").fetchone()
                self._connection.execute(f"PRAGMA user_version = {version}")  # writes a page, changes nothing
                self._connection.execute("COMMIT")
            except sqlite3.Error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            else:
                self._doubtful = False
                return True
        return False

    def _make_room(self, group: list[_Request]) -> bool:
        """Commit into the log's own blocks after moving its content into the file; use the reserve if necessary."""
        if self._checkpoint("PASSIVE") and self._committed(group):
            return True
        return self._use_reserve() and self._committed(group)

    def _use_reserve(self) -> bool:
        if not self._disk.hand_over(self._path, self._log):
            return False
        self._checkpoint("PASSIVE")
        return True

    def _shrink(self) -> None:
        """Truncate the file and its log to their content, with the reserve if necessary."""
        if not self._checkpoint("TRUNCATE") and self._use_reserve():
            self._checkpoint("TRUNCATE")

    def _checkpoint(self, mode: str) -> bool:
        """Move the log's content into the file, so that the log restarts; return whether that succeeded."""
        try:
            (busy, _, _) = self._connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        except sqlite3.OperationalError:
            return False  # no space to grow the file
        if mode != "TRUNCATE":
            self._hold()
        return not busy

    def _hold(self) -> None:
        """Hold free blocks for the next transitions, if the reserve was used."""
        if self._disk.is_spent:
            self._disk.hold_again(self._path, self._log, self._used_bytes())

    def _used_bytes(self) -> int:
        """Return the file's length after it has taken in the log's content."""
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        (page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        return int(pages * page_bytes)

    def _committed(self, group: list[_Request]) -> bool:
        """Return whether the group is on disk; False when the disk is full and all of it was rolled back."""
        committing = False
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for request in group:
                self._perform(request)
            committing = True
            self._connection.execute("COMMIT")
        except BaseException as error:
            self._doubtful |= committing and not is_cut_short(error)
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            if is_refused_by_disk(error):
                return False
            raise
        self._doubtful = False
        self._hold()  # the commit may have moved the log's content, and truncated the held blocks
        return True

    def _perform(self, request: _Request) -> None:
        request.error = None
        self._connection.execute("SAVEPOINT request")
        try:
            request.result = request.work(self._connection)
        except Exception as error:
            if is_refused_by_disk(error) or not self._connection.in_transaction:
                raise  # SQLite may have rolled back the whole transaction
            self._connection.execute("ROLLBACK TO request")
            request.error = self._translated(error)
        self._connection.execute("RELEASE request")

    def _translated(self, error: Exception) -> Exception:
        if is_damage(error):
            found: StoreError = StoreUnreadableError(self._path, str(error))
        elif isinstance(error, sqlite3.Error):
            found = StoreError(
                f"{self._path} could not be written ({error}); nothing of the request was stored: try again"
            )
        else:
            return error
        found.__cause__ = error
        return found


def _answer(group: list[_Request]) -> None:
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[_Request]] = defaultdict(list)
    for request in group:
        by_loop[request.loop].append(request)
    for loop, requests in by_loop.items():
        # One wake-up for all requests of a loop; a closed loop has no caller left.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, requests)


def _settle(requests: list[_Request]) -> None:
    for request in requests:
        if request.future.done():
            continue  # its caller was cancelled; the write remains
        if request.error is not None:
            request.future.set_exception(request.error)
        else:
            request.future.set_result(request.result)


_PAGE_BYTES = 4096
_LOG_PAGES = 1000  # size of the log at which its content is moved into the file; less with a small reserve
_LOG_LIMIT_BYTES = 64 * 1024 * 1024  # the write-ahead log is truncated to this after a checkpoint; below, it is reused


class Store:
    """The durable record of jobs, in one SQLite file. Created by ``open``; one process at a time holds it.

    A call that returned has its changes on disk; a call that raised stored nothing. A caller that is cancelled while it waits
    cannot see whether its write was done: it repeats the call, which is safe because both writing calls are idempotent.
    """

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
        """Accept the jobs of one submission, all or none; return their records and whether they are new.

        Each event has its own key. Where the user has submitted all of them, the first jobs are returned. Raises what ``submit``
        raises, IdempotencyConflictError also where only some of the keys were used before.
        """
        return await self._writer.do(lambda c: submit_all(c, events, self._admit), essential=False)

    async def submit(self, event: ev.JobSubmitted) -> tuple[Job, bool]:
        """Accept a job; return its record and whether it is new.

        The same uid with the same non-empty ``idempotency_key`` gets the first job and False. Raises
        IdempotencyConflictError when that job differs in spec, archive or origin, JobExistsError when the id is
        taken, DiskFullError when space is short.
        """
        (job,), created = await self.submit_all([event])
        return job, created

    async def matrix_jobs(self, matrix_id: str) -> list[Job]:
        """Return the jobs of a matrix, reruns included, in order of arrival; none where there is no such matrix."""
        return await self._read(lambda: self._reader.matrix_jobs(matrix_id))

    async def find_matrix(self, reference: str, uid: int) -> str | None:
        """Return the id of the matrix with this id, else of the user's newest with this name, else of the only one whose id starts with it.

        None where the reference means a job: its id, a name whose newest job is of no such matrix, or a prefix of its id.
        ``USER/NAME`` and NamedByOthersError as for ``find``. Raises AmbiguousJobError where several matrices and no job start with it.
        """
        return await self._read(lambda: self._reader.find_matrix(reference, uid))

    async def append(self, changes: Sequence[Change], *, clock: ClockReading | None = None, moved: float = 0.0) -> None:
        """Write events and the records folded from them, and a reading of the daemon's clock, all or none.

        ``moved``: by how many seconds the clock was moved since the last reading; the due times of notices move with it.

        The first change of each job follows from the stored version, every other one from its predecessor. Raises
        VersionConflictError, with BrokenChainError for changes that do not follow one another; JobNotFoundError;
        DiskFullError when even the reserve is used up. Changes that are already stored are not written again.
        """
        if changes or clock is not None:
            await self._writer.do(partial(append, batch=by_job(changes), clock=clock, moved=moved))

    async def clock(self) -> ClockReading | None:
        """Return the newest reading of the daemon's clock; None before the first."""
        return await self._read(self._reader.clock)

    async def load_live(self) -> list[Job]:
        """Return every job that is not terminal, in order of arrival.

        Here and in every other list, a job whose record is damaged is rebuilt from its events, and left out where that is impossible.
        """
        return await self._read(self._reader.live)

    async def job(self, job_id: JobId) -> Job:
        """Return one job. Raises JobNotFoundError; UnreadableRecordError for one that is set aside."""
        return await self._read(lambda: self._reader.job(job_id))

    async def damaged(self) -> list[DamagedRecord]:
        """Read every record; return those that are damaged. Their rows and events stay as they are."""
        return await self._aside(lambda connection: Reader(connection).damaged())

    async def archives(self) -> Mapping[str, str | None]:
        """Return the digest of each job's archive, empty for a job without one, by the job's id; None where it is unknown."""
        return await self._aside(lambda connection: Reader(connection).archives())

    async def jobs(self, query: JobFilter) -> list[Job]:
        """Return the jobs that match, newest first."""
        return await self._read(lambda: self._reader.jobs(query))

    async def events(self, job_id: JobId, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """Return a job's events with numbers above ``after``, oldest first. Raises JobNotFoundError."""
        return await self._read(lambda: self._reader.events(job_id, after, limit))

    async def every_event(self, job_id: JobId, *, after: int = 0) -> AsyncIterator[StoredEvent]:
        """Yield every event of a job with a number above ``after``, oldest first, in bounded memory. Raises JobNotFoundError."""
        while page := await self.events(job_id, after=after, limit=PAGE_EVENTS):
            for stored in page:
                yield stored
            if len(page) < PAGE_EVENTS:
                return
            after = page[-1].number

    async def every_record(self, job_id: JobId) -> AsyncIterator[tuple[Job, ev.Event]]:
        """Yield every event of a job with the record after it, in order. Raises JobNotFoundError."""
        record: Job | None = None
        async for stored in self.every_event(job_id):
            event = stored.event
            if isinstance(event, ev.JobSubmitted):
                record = submitted(event, 0)
            elif record is not None:
                record = fold(record, event)
            if record is not None:
                yield record, event

    async def accepted(self, uid: int, idempotency_key: str) -> Job | None:
        """Return the job that this user submitted with this key; None without one, or for an empty key."""
        return await self._read(lambda: self._reader.accepted(uid, idempotency_key))

    async def find(self, reference: str, uid: int) -> Found:
        """Return the job with this id, else the user's newest with this name, else the only one whose id starts with it.

        ``USER/NAME`` is the newest of that name of another user. Raises JobNotFoundError, NamedByOthersError where only other
        users have the name, and AmbiguousJobError.
        """
        return await self._read(lambda: self._reader.find(reference, uid))

    async def state_counts(self) -> Mapping[JobState, int]:
        """Return the number of jobs by state, every state present; finished ones until they are pruned."""
        return await self._read(self._reader.state_counts)

    async def finished_counts(self) -> list[FinishedCount]:
        """Return the counts of jobs that ended since the store was created; pruning does not lower them."""
        return await self._read(self._reader.finished_counts)

    async def due_notices(self, now: float, each: int) -> tuple[list[StoredNotice], float | None]:
        """Return the notices due by ``now`` (wall time), at most ``each`` of a receiver, and when the next becomes due.

        ``submit`` and ``append`` write notices together with their transitions.
        """
        return await self._read(lambda: self._reader.due_notices(now, each))

    async def settle_notice(self, number: int, *, again_at: float | None) -> None:
        """Remove a delivered or abandoned notice (None), or schedule its next try at a wall time."""
        await self._writer.do(lambda c: settle_notice(c, number, again_at))

    async def places(self) -> list[StoredPlace]:
        """Return every restriction of a node or a GPU."""
        return await self._read(self._reader.places)

    async def put_places(self, places: Sequence[StoredPlace]) -> None:
        """Replace the restrictions of these places, all or none. A body of None removes a restriction."""
        if places:
            await self._writer.do(lambda c: put_places(c, places))

    async def queue_changes(self) -> list[StoredQueueChange]:
        """Return every change of a queue, the oldest first."""
        return await self._read(self._reader.queue_changes)

    async def put_queue_change(self, change: StoredQueueChange) -> None:
        """Store a change of a queue."""
        await self._writer.do(lambda c: put_queue_change(c, change), essential=False)

    async def untidied(self) -> list[JobId]:
        """Return the terminal jobs whose leftovers are not yet removed, in order of arrival.

        ``append`` notes a job here in the transaction that ends it.
        """
        return await self._read(self._reader.untidied)

    async def tidied(self, job_ids: Sequence[JobId]) -> None:
        """Record that nothing is left of these jobs outside their directories. Unknown ids change nothing."""
        if job_ids:
            await self._writer.do(lambda c: tidied(c, job_ids))

    async def ended_before(self, older_than: float, keep: Collection[JobId] = frozenset()) -> list[JobId]:
        """Return the terminal jobs that ended before this wall time, except those in ``keep``, the oldest first: what ``prune`` would delete."""
        return await self._read(lambda: self._reader.ended_before(older_than, keep))

    async def prune(self, older_than: float, keep: Collection[JobId] = frozenset()) -> list[JobId]:
        """Delete terminal jobs that ended before this wall time and their events, never those in ``keep``; return their ids."""
        forgotten: list[JobId] = []
        limit = PRUNE_BATCH
        while True:
            try:
                batch = await self._writer.do(
                    partial(prune, older_than=older_than, limit=limit, keep=keep), shrinks=True
                )
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
        """Return the errors found in the store, one sentence each: damage, or rows that differ from the fold of their events."""
        return await self._aside(verification.problems)

    async def backup(self, target: Path) -> None:
        """Write a copy of the store's current content to ``target``. Raises BackupExistsError."""
        await self._aside(lambda c: backup.write(c, target))

    async def answers(self) -> None:
        """Return once a read and a write have completed; changes nothing."""
        await asyncio.gather(self._read(self._reader.state_counts), self._writer.do(lambda _: None))

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
