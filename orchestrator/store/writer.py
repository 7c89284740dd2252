"""The only thread that writes, with group commit: requests that arrive during a commit share the next one.

Each request runs in a savepoint of its group's transaction, so a failed one does not affect the others. A request is
answered after the commit that holds it. The thread handles transactions and full disks; the requests define their own
work.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.store.errors import (
    OutcomeUnknownError,
    StoreClosedError,
    StoreError,
    StoreUnreadableError,
    is_cut_short,
    is_damage,
    is_refused_by_disk,
    refused_by_disk,
)
from orchestrator.store.port import DiskTrouble

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.store.disk import Disk

WIPE_TRIES = 3
MAX_GROUP = 256  # bounds how long the first of a group waits for the work of the last


class Work(Protocol):
    """The work of a request inside the transaction, and what follows when the transaction is on disk."""

    essential: bool
    """Whether the request may use the reserve, as a transition of an accepted job may."""
    shrinks: bool
    """Whether the request leaves free space in the file, which is returned to the disk."""

    def __call__(self, connection: sqlite3.Connection) -> Any:
        """Do the work; the result answers the request. It is called again after a rollback of its transaction."""


@dataclass(slots=True)
class _Request:
    work: Work
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


class Writer:
    """Owns the writing connection and its thread."""

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

    async def do(self, work: Work) -> Any:
        """Queue ``work`` and wait for its commit. Raises its error, and errors of the store."""
        loop = asyncio.get_running_loop()
        request = _Request(work, loop, loop.create_future())
        with self._closing:
            if self._closed:
                raise StoreClosedError(f"{self._path} is closed: open it again")
            self._requests.put(request)
        return await request.future

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
            if any(r.work.shrinks and r.error is None for r in group):
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
            essential = [r for r in group if r.work.essential]
            written = bool(essential) and (self._committed(essential) or self._make_room(essential))
            gone = written or not self._doubtful or self._wipe()
            for request in group:
                what = "so nothing new is accepted"
                if request.work.essential:
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
