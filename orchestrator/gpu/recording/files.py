"""Append-only files of a recording: CSV, and a JSON array that is valid at every moment.

Both only grow. A CSV file gets whole lines. A JSON array needs its closing bracket, and no single write can insert an
element before it without the risk that a reader or a crash sees a torn file. So there are two copies of the array, one
with the visible name and one hidden: new elements are appended to the hidden one, which then takes the name by an
atomic rename, and the other one catches up next time. A copy that was visible a moment ago may still be open in another
process, so it is written only once no process has it open (a file lease shows that); until then elements wait in memory, for
a limited time. A process killed at any point leaves a whole array behind. The cost is writing each element twice.
Without hard links in the filesystem, there is one copy, and a kill in the middle of a write can tear it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_EMPTY: Final = b"[\n]\n"
_END: Final = b"\n]\n"
_TWIN: Final = ".twin"


class LineFile:
    """A text file to which whole lines are appended."""

    def __init__(self, path: Path, header: str) -> None:
        """Create `path` with a first line. Raises FileExistsError rather than write into another recording."""
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._size = 0
        self.append([header])

    def append(self, lines: Sequence[str]) -> None:
        """Append lines in one write. Raises OSError when the disk is full."""
        if not lines:
            return
        data = ("\n".join(lines) + "\n").encode()
        if os.pwrite(self._file, data, self._size) < len(data):
            os.ftruncate(self._file, self._size)
            raise _disk_full()
        self._size += len(data)

    def close(self) -> None:
        """Flush it to disk and close it. Idempotent."""
        if self._file >= 0:
            _sync(self._file)
            os.close(self._file)
            self._file = -1


class JsonArrayFile:
    """A file that holds a JSON array, one element a line."""

    def __init__(
        self,
        path: Path,
        *,
        patience_seconds: float = 10.0,
        close_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create `path` with an empty array. Raises FileExistsError rather than write into another recording.

        A program that keeps a copy open for longer than `patience_seconds` may see it change; `close` waits for it
        for no longer than `close_seconds`.
        """
        self.path = path
        self._patience_seconds, self._close_seconds, self._clock = patience_seconds, close_seconds, clock
        _sweep(path.parent)
        self._visible = _Copy(path)
        self._twin_path = path.with_name(f".{path.name}{_TWIN}")
        self._hidden: _Copy | None = _Copy(self._twin_path)
        fcntl.flock(self._hidden.file, fcntl.LOCK_EX)
        fcntl.flock(self._visible.file, fcntl.LOCK_EX)
        self._waiting: list[str] = []
        self._written = clock()
        if not _hard_links(path, self._twin_path.with_suffix(".probe")):
            self._hidden.close()
            self._twin_path.unlink()
            self._hidden = None

    def append(self, elements: Sequence[str]) -> None:
        """Append elements, JSON texts without line breaks, once no reader blocks it.

        Raises OSError when the disk is full; elements appended since the last success are then dropped.
        """
        if self._hidden is None:
            if elements:
                self._visible.append(elements)
            return
        self._waiting.extend(elements)
        if self._waiting and (self._hidden.unread() or self._clock() - self._written > self._patience_seconds):
            self._write(self._hidden)

    def _write(self, hidden: _Copy) -> None:
        """Write all waiting elements to the hidden copy, and make it visible."""
        waiting, self._waiting = self._waiting, []
        shown = self._visible
        hidden.append([*hidden.behind, *waiting])
        hidden.behind.clear()
        _sync(hidden.file)
        self._swap()
        shown.behind.extend(waiting)
        self._written = self._clock()

    def _swap(self) -> None:
        """Give the visible name to the hidden copy."""
        assert self._hidden is not None
        aside = self._twin_path.with_suffix(".aside")
        aside.unlink(missing_ok=True)
        os.link(self.path, aside)
        self._twin_path.replace(self.path)
        aside.replace(self._twin_path)
        self._visible, self._hidden = self._hidden, self._visible

    def close(self) -> None:
        """Write waiting elements, keep only the visible copy. Idempotent."""
        if self._hidden is not None:
            deadline = time.monotonic() + self._close_seconds
            while self._waiting and not self._hidden.unread() and time.monotonic() < deadline:
                time.sleep(0.01)
            if self._waiting:
                self._write(self._hidden)
            self._twin_path.unlink(missing_ok=True)
            self._hidden.close()
            self._hidden = None
        self._visible.close()


class _Copy:
    """One copy of the array; `behind` are elements that only the other copy has."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        if os.write(self.file, _EMPTY) < len(_EMPTY):
            raise _disk_full()
        self.behind: list[str] = []
        self._tail = 1
        self._first = True

    def unread(self) -> bool:
        """Whether no other process has the file open; assumed where the filesystem does not report it."""
        try:
            # A write lease is granted only to the sole opener. Breaking it must not kill this process, as SIGIO would.
            fcntl.fcntl(self.file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self.file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            return error.errno != errno.EAGAIN
        fcntl.fcntl(self.file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True

    def append(self, elements: Sequence[str]) -> None:
        """Write elements over the closing bracket, and a new bracket after them, in one write."""
        start = "\n" if self._first else ",\n"
        text = (start + ",\n".join(elements)).encode()
        if os.pwrite(self.file, text + _END, self._tail) < len(text) + len(_END):
            os.pwrite(self.file, _END, self._tail)  # undo the partial write
            os.ftruncate(self.file, self._tail + len(_END))
            raise _disk_full()
        self._tail += len(text)
        self._first = False

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def _disk_full() -> OSError:
    """Return the error of a short write to a regular file."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _sync(file: int) -> None:
    """Flush a file's data to disk, where its kind supports that."""
    with contextlib.suppress(OSError):
        os.fdatasync(file)


def _hard_links(path: Path, probe: Path) -> bool:
    """Whether this filesystem supports hard links."""
    try:
        os.link(path, probe)
    except OSError:
        return False
    probe.unlink()
    return True


def _sweep(directory: Path) -> None:
    """Remove hidden copies that a killed recording left in `directory`; one in use is locked."""
    for leftover in (*directory.glob(f".*.json{_TWIN}"), *directory.glob(".*.json.aside")):
        try:
            file = os.open(leftover, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink(missing_ok=True)
        except OSError:
            continue
        finally:
            os.close(file)
