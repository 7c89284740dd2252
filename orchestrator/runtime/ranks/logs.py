"""Writes a rank's output to disk, in the rank's actor. ``log_reading.py`` reads it, also after the job has ended.

One file per attempt and rank, ``attempt-0001/rank-00000.log``; a line is ``TIME STREAM TEXT``, TIME in seconds since the
epoch with microseconds, STREAM ``o`` or ``e`` (capitals: the line continues in the next one). Files are capped: a full
one becomes ``.log.1``, older ones are renumbered, the oldest is removed. Secrets are masked before they reach the disk.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.private_files import make_private, open_private
from orchestrator.runtime.forkserver.masking import Masker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

TAIL_LINES: Final = 40
TAIL_CHARACTERS: Final = 2000  # per line: these lines become part of the job's record
LONGEST_LINE_BYTES: Final = 64 * 1024
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One line of a rank's output. ``at`` is seconds since the epoch; ``stream`` is stdout or stderr."""

    at: float
    attempt: int
    rank: int
    stream: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """The size limit of one rank's log: bytes per file, and how many full files are kept beside the current one."""

    max_bytes: int = 64 * 1024 * 1024
    keep_files: int = 2


def log_path(directory: Path, attempt: int, rank: int) -> Path:
    """Return the current log file of a rank's attempt."""
    return directory / f"attempt-{attempt:04d}" / f"rank-{rank:05d}.log"


class LogWriter:
    """Splits output into lines, masks secrets, adds time stamps, rotates. Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        path: Path,
        *,
        masker: Masker | None = None,
        limits: LogLimits | None = None,
        listener: Callable[[str], None] | None = None,
    ) -> None:
        self._path = path
        self._limits = limits or LogLimits()
        self._masker = masker or Masker(())
        self._partial: dict[str, bytes] = {"o": b"", "e": b""}
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._lost: str | None = None
        self._listener = listener
        self.lines = 0
        self._file: int | None = None
        self._size = 0
        try:
            self._open()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._lose(error)  # the rank continues; its last lines are kept in memory

    @property
    def tail(self) -> tuple[str, ...]:
        """Return the last lines, without time stamps; only both ends of long lines."""
        return tuple(self._tail)

    @property
    def lost(self) -> str | None:
        """Return why output could not be written (a full disk), or None."""
        return self._lost

    def feed(self, stream: str, data: bytes, at: float) -> None:
        """Process bytes from a pipe; ``stream`` is ``o`` or ``e``, ``at`` their arrival (seconds since the epoch)."""
        whole = self._partial[stream] + data
        *lines, rest = whole.split(b"\n")
        out = [self._line(stream, line, at) for line in lines]
        if len(rest) > LONGEST_LINE_BYTES:
            masked = self._masker.data(rest)
            kept = self._masker.beginning(masked)  # the rest of the secret may follow
            out.append(self._line(stream.upper(), masked[: len(masked) - kept], at))
            rest = masked[len(masked) - kept :]
        self._partial[stream] = rest
        if out:
            self._write(b"".join(out))

    def note(self, lines: Iterable[str], at: float) -> None:
        """Write lines from orch: they are in the file, but are neither the rank's output nor part of its tail."""
        self._write(
            b"".join(self._stamped("e", self._masker.data(line.encode(errors="replace")), at) for line in lines)
        )

    def close(self, at: float) -> None:
        """Write an unfinished last line, and close."""
        for stream, rest in self._partial.items():
            if rest:
                self._write(self._line(stream, rest, at))
        self._partial = {"o": b"", "e": b""}
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        self._file = _append_to(self._path)
        self._size = os.fstat(self._file).st_size
        return self._file

    def _lose(self, error: OSError) -> None:
        self._lost = f"output is being lost: {error.strerror} ({self._path})"

    def _line(self, stream: str, line: bytes, at: float) -> bytes:
        line = self._masker.data(line).removesuffix(b"\r")
        if b"\r" in line:  # a progress bar redraws its line; the last version counts
            line = line.rsplit(b"\r", 1)[1]
        self.lines += 1
        text = line.decode(errors="replace")
        self._tail.append(_clipped(text))
        if self._listener is not None:
            self._listener(text)
        return self._stamped(stream, line, at)

    def _stamped(self, stream: str, line: bytes, at: float) -> bytes:
        return b"%.6f %s %s\n" % (at, stream.encode(), line)

    def _write(self, data: bytes) -> None:
        try:
            file = self._open() if self._file is None else self._file
            if self._size and self._size + len(data) > self._limits.max_bytes:
                file = self._rotate(file)
            if os.write(file, data) < len(data):
                os.ftruncate(file, self._size)  # leave no partial line
                self._lose(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
                return
            self._size += len(data)
            self._lost = None
        except OSError as error:
            self._lose(error)

    def _rotate(self, file: int) -> int:
        os.close(file)
        self._file = None
        for number in range(self._limits.keep_files, 0, -1):
            source = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            if source.exists():
                source.replace(self._path.with_name(f"{self._path.name}.{number}"))
        self._file = _append_to(self._path)
        os.ftruncate(self._file, 0)  # reuse the file where no full file is kept
        self._size = 0
        return self._file


def _append_to(path: Path) -> int:
    """Open the log, in a directory of this user only. A link in its place is not followed: a rank can have created one."""
    make_private(path.parent)
    return open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _clipped(text: str) -> str:
    if len(text) <= TAIL_CHARACTERS:
        return text
    half = TAIL_CHARACTERS // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"
