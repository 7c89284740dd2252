"""A rank's log: written by its actor, read by the daemon, also after the job has ended.

One file per attempt and rank, ``attempt-0001/rank-00000.log``; a line is ``TIME STREAM TEXT``, TIME in seconds since the
epoch with microseconds, STREAM ``o`` or ``e`` (capitals: the line continues in the next one). Files are capped: a full
one becomes ``.log.1``, older ones are renumbered, the oldest is removed. Secrets are masked before they reach the disk.

A progress bar draws one line again and again. While it does, the line's newest version is written every ``DRAWN_SECONDS``,
if it has changed, and its last version when the line ends. An unfinished line that stays unfinished is written in parts.

The job's own processes can write to the files, so a reader opens only regular files, a line has a maximum length, and
memory holds one piece of each rank's log.
"""

from __future__ import annotations

import errno
import heapq
import os
import re
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeVar

from orchestrator.abandoned import stop_if_abandoned
from orchestrator.core.codec import LATEST_TIME
from orchestrator.private_files import make_private, open_private
from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.spec.plain_files import NotPlainFileError, open_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

TAIL_LINES: Final = 40
TAIL_CHARACTERS: Final = 2000  # per line: these lines become part of the job's record
LONGEST_LINE_BYTES: Final = 64 * 1024
DRAWN_SECONDS: Final = 5.0
"""Time between two versions of a drawn line in the log, and after which an unfinished line is written."""
QUIET_SECONDS: Final = 1.0
"""Without output for this long, the version that is being drawn is whole: a read can end in its middle."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_REDRAW: Final = re.compile(rb"\r|\x08{2,}|\x1b\[[01]?G")
"""What a program writes to draw its line again: return, backspaces, or the terminal's command for the first column."""
_UP: Final = re.compile(rb"\x1b\[([0-9]{0,3})[AF]")
"""What it writes to draw the lines above again, as for several bars at once."""
_CONTROL: Final = re.compile(rb"\x1b\[[0-9;?]{0,20}[A-Za-ln-z]|\x08")
_COLOUR: Final = re.compile(rb"\x1b\[[0-9;]{0,20}m")


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


@dataclass(slots=True, kw_only=True)
class _Unfinished:
    """The end of a stream: a line without its line break, and lines that are drawn together.

    ``shown`` and ``told`` are the versions of a drawn line that the log and the listener have. ``above``: so many lines above
    are drawn again by dropped versions; ``left``: so many of the next lines are part of ``block``.
    """

    line: bytes = b""
    began: float = 0.0
    newest: float = 0.0
    is_partly_written: bool = False
    shown: bytes = b""
    told: bytes = b""
    above: int = 0
    left: int = 0
    block: list[bytes] = field(default_factory=list)

    @property
    def is_drawn(self) -> bool:
        """Whether the line that ends next is more than its last bytes."""
        return bool(self.shown or self.told or self.above or self.left or self.block or self.is_partly_written)


class LogWriter:
    """Splits output into lines, masks secrets, adds time stamps, rotates. Not thread-safe: one event loop owns it.

    ``drawn_seconds``: time between two versions of a drawn line.
    """

    def __init__(
        self,
        path: Path,
        *,
        masker: Masker | None = None,
        limits: LogLimits | None = None,
        listener: Callable[[str], None] | None = None,
        drawn_seconds: float = DRAWN_SECONDS,
    ) -> None:
        self._path = path
        self._drawn_seconds, self._quiet_seconds = drawn_seconds, min(QUIET_SECONDS, drawn_seconds)
        self._limits = limits or LogLimits()
        self._masker = masker or Masker(())
        self._streams = {"o": _Unfinished(), "e": _Unfinished()}
        self._drawn_in_tail = ""
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

    @property
    def is_unfinished(self) -> bool:
        """Whether something was printed that ``write_unfinished`` has not written yet."""
        return any(state.block or (state.line and not self._is_in_log(state)) for state in self._streams.values())

    def feed(self, stream: str, data: bytes, at: float) -> None:
        """Process bytes from a pipe; ``stream`` is ``o`` or ``e``, ``at`` their arrival (seconds since the epoch)."""
        state = self._streams[stream]
        if not state.line:
            state.began = at
        state.newest = at
        *lines, rest = (state.line + data).split(b"\n")
        out = [self._ended(stream, state, line, at) for line in lines]
        if lines:
            state.began = at
        if _is_drawn(rest):
            rest = self._newest_versions(state, rest)
        if len(rest) > LONGEST_LINE_BYTES:
            out.append(self._part(stream, state, rest, at))
        else:
            state.line = rest
        self._write(b"".join(out))

    def write_unfinished(self, at: float) -> None:
        """Write what is on the rank's last lines, and not yet in the log; call it every ``DRAWN_SECONDS``."""
        self._write(b"".join(self._unfinished(stream, state, at) for stream, state in self._streams.items()))

    def note(self, lines: Iterable[str], at: float) -> None:
        """Write lines from orch: they are in the file, but are neither the rank's output nor part of its tail."""
        self._write(
            b"".join(self._stamped("e", self._masker.data(line.encode(errors="replace")), at) for line in lines)
        )

    def end_lines(self, at: float) -> None:
        """Write unfinished last lines: the rank writes no more."""
        for stream, state in self._streams.items():
            out = self._ended(stream, state, state.line, at) if state.line else b""
            self._write(out + self._block(stream, state, at))
            self._streams[stream] = _Unfinished()

    def close(self, at: float) -> None:
        """Write unfinished last lines, and close."""
        self.end_lines(at)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        self._file = _append_to(self._path)
        self._size = os.fstat(self._file).st_size
        return self._file

    def _lose(self, error: OSError) -> None:
        self._lost = f"output is being lost: {error.strerror} ({self._path})"

    def _ended(self, stream: str, state: _Unfinished, line: bytes, at: float) -> bytes:
        """Return what is written for a line that has ended. One of several that are drawn again waits for its turn."""
        line = self._masker.data(line).removesuffix(b"\r")
        if not (b"\x1b" in line or b"\r" in line or b"\x08" in line or state.is_drawn):  # most lines
            return self._line(stream, line, at, is_told=False)
        above = state.above + _lines_up(line)
        is_drawn = bool(above or state.shown) or _is_drawn(line)
        text = _last_version(line) if is_drawn else line
        is_written = (text == state.shown != b"") or (state.is_partly_written and not text)
        self._tell(state, text)
        state.line, state.shown, state.told, state.above, state.is_partly_written = b"", b"", b"", 0, False
        if above:
            state.block, state.left = [], above
        if state.left:
            state.left -= 1
            state.block += [text] if text else []
            return b""
        out = self._block(stream, state, at)
        return out if is_written else out + self._line(stream, text, at, is_drawn=is_drawn)

    def _newest_versions(self, state: _Unfinished, rest: bytes) -> bytes:
        """Return the newest whole version of a drawn line, and the one that is being drawn; older ones are dropped."""
        *versions, current = _REDRAW.split(rest)
        number = next((n for n in reversed(range(len(versions))) if _last_version(versions[n])), len(versions) - 1)
        state.above += sum(_lines_up(version) for version in versions[:number])
        version = _last_version(self._masker.data(versions[number]))
        if version and version != state.told:
            self.lines += 1  # a sign of life
            self._tell(state, version)
        return versions[number] + b"\r" + current

    def _unfinished(self, stream: str, state: _Unfinished, at: float) -> bytes:
        out = self._block(stream, state, at)
        if not _is_drawn(state.line):
            is_due = state.line and at - state.began >= self._drawn_seconds
            return out + self._part(stream, state, state.line, at) if is_due else out
        line = self._masker.data(state.line)
        line = line[: len(line) - self._masker.beginning(line)]
        if at - state.newest < self._quiet_seconds:
            line = _REDRAW.split(line)[0]
        text = _last_version(line)
        if not text or text == state.shown:
            return out
        state.shown = text
        self._tell(state, text)
        return out + self._line(stream, text, at, is_drawn=True, is_last=False)

    def _is_in_log(self, state: _Unfinished) -> bool:
        return _is_drawn(state.line) and _last_version(self._masker.data(state.line)) in (b"", state.shown)

    def _block(self, stream: str, state: _Unfinished, at: float) -> bytes:
        """Return the newest version of several lines that are drawn together."""
        lines, state.block = state.block, []
        return b"".join(self._line(stream, line, at, is_drawn=True, is_last=False) for line in lines)

    def _part(self, stream: str, state: _Unfinished, line: bytes, at: float) -> bytes:
        """Return what is written of a line that continues; the rest stays, if a secret may begin there."""
        masked = self._masker.data(line)
        kept = self._masker.beginning(masked)
        state.line, state.began = masked[len(masked) - kept :], at
        if len(masked) == kept:
            return b""
        state.is_partly_written = True
        text = masked[: len(masked) - kept]
        text = _last_version(text) if _is_drawn(text) else text
        self._tell(state, text)
        return self._line(stream.upper(), text, at)

    def _tell(self, state: _Unfinished, line: bytes) -> None:
        if self._listener is not None and line != state.told:
            state.told = line
            self._listener(line.decode(errors="replace"))

    def _line(
        self, stream: str, line: bytes, at: float, *, is_drawn: bool = False, is_last: bool = True, is_told: bool = True
    ) -> bytes:
        """Return the masked ``line`` with its stamp, and add it to the tail, where a drawn line has one place."""
        self.lines += 1
        text = line.decode(errors="replace")
        if is_drawn and self._drawn_in_tail == stream:
            self._tail.pop()
        self._tail.append(_clipped(text))
        self._drawn_in_tail = "" if is_last else stream
        if self._listener is not None and not is_told:
            self._listener(text)
        return self._stamped(stream, line, at)

    def _stamped(self, stream: str, line: bytes, at: float) -> bytes:
        return b"%.6f %s %s\n" % (at, stream.encode(), line)

    def _write(self, data: bytes) -> None:
        if not data:
            return
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
        renumber(self._path, self._limits.keep_files)
        self._file = _append_to(self._path)
        os.ftruncate(self._file, 0)  # reuse the file where no full file is kept
        self._size = 0
        return self._file


def _is_drawn(line: bytes) -> bool:
    """Whether a part of the line was drawn over another. A carriage return at the end of a whole line does not count."""
    return (b"\r" in line or b"\x08" in line or b"\x1b" in line) and _REDRAW.search(line) is not None


def _last_version(line: bytes) -> bytes:
    """Return the newest version of a drawn line that shows anything, without commands to the terminal but for colours."""
    for version in reversed(_REDRAW.split(line)):
        text = _CONTROL.sub(b"", version)
        if _COLOUR.sub(b"", text).strip():
            return text.rstrip(b" ")
    return b""


def _lines_up(line: bytes) -> int:
    return sum(int(count or b"1") for count in _UP.findall(line)) if b"\x1b" in line else 0


def renumber(path: Path, keep_files: int) -> None:
    """Rename a full log and the older ones beside it: ``.log`` to ``.log.1``, and so on; the oldest is replaced."""
    for number in range(keep_files, 0, -1):
        source = path.with_name(f"{path.name}.{number - 1}") if number > 1 else path
        if source.exists():
            source.replace(path.with_name(f"{path.name}.{number}"))


def _append_to(path: Path) -> int:
    """Open the log, in a directory of this user only. A link in its place is not followed: a rank can have created one."""
    make_private(path.parent)
    return open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _clipped(text: str) -> str:
    if len(text) <= TAIL_CHARACTERS:
        return text
    half = TAIL_CHARACTERS // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"


LARGEST_PIECE_BYTES: Final = 256 * 1024
SMALLEST_PIECE_BYTES: Final = 8 * 1024
ALL_PIECES_BYTES: Final = 16 * 1024 * 1024
"""Size of the pieces of all ranks together, as far as the minimum size allows."""
BATCH_LINES: Final = 1000
LONGEST_READ_BYTES: Final = 8 * LONGEST_LINE_BYTES
"""Longest line: one read of a pipe plus what was kept before is shorter; longer lines are skipped."""
MAX_SKIPPED_BYTES: Final = 32 * 1024 * 1024
"""Most bytes read in a row from a file in which no log line is found: it is not a log."""
_LONGEST_STAMP: Final = 32
_ATTEMPT = re.compile(r"attempt-(\d{1,9})")
_FILE = re.compile(r"rank-(\d{1,9})\.log(?:\.(\d{1,4}))?")
_UNREADABLE: Final = "[orch] {name} is left out: {why}"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _File:
    """One file of a rank's log, identified by its inode: rotation changes its name."""

    path: Path
    inode: int
    attempt: int
    rank: int

    @property
    def key(self) -> tuple[str, int]:
        return str(self.path.parent), self.inode


class LogReader:
    """Reads the lines of a job, or of one of its attempts or ranks; lines of several ranks are merged by time.

    Attempts before ``first_attempt`` are skipped. Not thread-safe.
    """

    def __init__(
        self, directory: Path, *, attempt: int | None = None, rank: int | None = None, first_attempt: int = 0
    ) -> None:
        self._directory = directory
        self._attempt = attempt
        self._first_attempt = first_attempt
        self._rank = rank
        self._offsets: dict[tuple[str, int], int] = {}
        self._reported: set[tuple[str, int]] = set()

    def batches(self, since: float | None = None) -> Iterator[list[LogEntry]]:
        """Return every line that was added since the last call, oldest first; with ``since``, those from that time on."""
        for streams in self._attempts():
            piece = _piece_bytes(len(streams))
            lines = heapq.merge(*(self._forward(files, since, piece) for files in streams), key=attrgetter("at"))
            chosen = lines if since is None else (entry for entry in lines if entry.at >= since)
            yield from batched(chosen, BATCH_LINES)

    def last(self, count: int, since: float | None = None) -> list[LogEntry]:
        """Return the newest ``count`` lines, oldest first. ``batches`` then returns the lines after them."""
        attempts = self._attempts()
        # Positions first: lines that arrive during this call are for the next one.
        self._offsets |= {file.key: self._end(file) for streams in attempts for files in streams for file in files}
        found: list[LogEntry] = []
        for streams in reversed(attempts):
            piece = _piece_bytes(len(streams))
            # Among lines with the same time, those of the higher rank come last, and so first here.
            ranks = [self._backward(files, since, piece) for files in reversed(streams)]
            found += islice(heapq.merge(*ranks, key=attrgetter("at"), reverse=True), count - len(found))
        return found[::-1]

    # -- which files there are

    def _attempts(self) -> list[list[list[_File]]]:
        """Return the files by attempt and rank, all oldest first."""
        return [streams for number, folder in self._folders() if (streams := self._streams(number, folder))]

    def _folders(self) -> list[tuple[int, Path]]:
        found = []
        for entry in _entries_of(self._directory):
            match = _ATTEMPT.fullmatch(entry.name)
            if match is None or not entry.is_dir(follow_symlinks=False):
                continue
            number = int(match[1])
            if number >= self._first_attempt and self._attempt in (None, number):
                found.append((number, self._directory / entry.name))
        return sorted(found)

    def _streams(self, attempt: int, folder: Path) -> list[list[_File]]:
        ranks: dict[int, list[tuple[int, _File]]] = {}
        for entry in _entries_of(folder):
            match = _FILE.fullmatch(entry.name)
            if match is None or self._rank not in (None, int(match[1])):
                continue
            rank, age = int(match[1]), int(match[2] or 0)
            ranks.setdefault(rank, []).append((-age, _File(folder / entry.name, entry.inode(), attempt, rank)))
        return [[file for _, file in sorted(files, key=lambda each: each[0])] for _, files in sorted(ranks.items())]

    # -- one rank's files

    def _forward(self, files: Sequence[_File], since: float | None, piece: int) -> Iterator[LogEntry]:
        for file in files:
            handle = self._open(file)
            if isinstance(handle, LogEntry):
                yield handle
            elif handle is not None:
                try:
                    if since is not None and (facts := os.fstat(handle)).st_mtime < since:
                        self._offsets[file.key] = facts.st_size  # all its lines are older
                        continue
                    yield from self._read_on(handle, file, piece)
                finally:
                    os.close(handle)

    def _backward(self, files: Sequence[_File], since: float | None, piece: int) -> Iterator[LogEntry]:
        for file in reversed(files):
            handle = self._open(file)
            if isinstance(handle, LogEntry):
                yield handle
            elif handle is not None:
                try:
                    for entry in _read_back(handle, self._offsets[file.key], file, piece):
                        if since is not None and entry.at < since:
                            return
                        yield entry
                finally:
                    os.close(handle)

    def _open(self, file: _File) -> int | LogEntry | None:
        """Open the file under its current name; return a line about a failure, once; None for a removed file."""
        try:
            return _open_inode(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            if file.key in self._reported:
                return None
            self._reported.add(file.key)
            text = _UNREADABLE.format(name=file.path.name, why=error.strerror)
            return LogEntry(at=_changed_at(file.path), attempt=file.attempt, rank=file.rank, stream="stderr", text=text)

    def _read_on(self, handle: int, file: _File, piece: int) -> Iterator[LogEntry]:
        end = os.fstat(handle).st_size
        at = found = min(self._offsets.get(file.key, 0), end)  # less: the file was truncated
        while at < end and at - found <= MAX_SKIPPED_BYTES:
            stop_if_abandoned()
            data = os.pread(handle, min(piece, end - at), at)
            whole = data.rfind(b"\n") + 1
            if not whole:
                data = os.pread(handle, min(LONGEST_READ_BYTES, end - at), at)
                whole = data.rfind(b"\n") + 1
            if whole:
                at += whole
            elif len(data) == LONGEST_READ_BYTES:
                at = _after_newline(handle, at, min(end, at + MAX_SKIPPED_BYTES))
            else:  # the unfinished last line
                return
            self._offsets[file.key] = at
            for entry in _entries(data[:whole], file):
                found = at
                yield entry
        if at < end:
            self._offsets[file.key] = end

    def _end(self, file: _File) -> int:
        """Return the position after the file's last whole line."""
        try:
            handle = _open_inode(file)
        except OSError:
            return 0
        try:
            size = os.fstat(handle).st_size
            start = max(0, size - LONGEST_READ_BYTES)
            whole = os.pread(handle, size - start, start).rfind(b"\n") + 1
            return start + whole if whole else (0 if start == 0 else size)
        finally:
            os.close(handle)


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of at most ``size``; as ``itertools.batched`` of Python 3.12."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _entries_of(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _open_inode(file: _File) -> int:
    """Open the file by its inode. Raises FileNotFoundError when no name of the rank's log refers to it any more."""
    stem = file.path.name.partition(".log")[0]
    for path in (file.path, *sorted(file.path.parent.glob(f"{stem}.log*"))):
        try:
            handle = open_plain(path, real=True)
        except FileNotFoundError:
            continue
        except NotPlainFileError:
            if path == file.path:
                raise
            continue
        if os.fstat(handle).st_ino == file.inode:
            return handle
        os.close(handle)
    raise FileNotFoundError(file.path)


def _after_newline(handle: int, at: int, end: int) -> int:
    """Return the position after the next line break, or the end."""
    while at < end:
        stop_if_abandoned()
        data = os.pread(handle, min(LARGEST_PIECE_BYTES, end - at), at)
        found = data.find(b"\n")
        if found >= 0:
            return at + found + 1
        if not data:
            return end
        at += len(data)
    return end


def _read_back(handle: int, end: int, file: _File, piece: int) -> Iterator[LogEntry]:
    """Yield the lines before ``end``, the newest first."""
    at = found = end
    rest = b""
    while at > 0 and found - at <= MAX_SKIPPED_BYTES:
        stop_if_abandoned()
        size = min(piece, at)
        at -= size
        data = os.pread(handle, size, at) + rest
        first = data.find(b"\n") + 1 if at else 0  # the first line began in the previous piece
        rest = data[:first] if first <= LONGEST_READ_BYTES else b""
        for entry in reversed(list(_entries(data[first:], file))):
            found = at
            yield entry


def _piece_bytes(streams: int) -> int:
    return max(SMALLEST_PIECE_BYTES, min(LARGEST_PIECE_BYTES, ALL_PIECES_BYTES // max(streams, 1)))


def _changed_at(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _entries(data: bytes, file: _File) -> Iterator[LogEntry]:
    for line in data.split(b"\n"):
        stamp, _, rest = line.partition(b" ")
        if len(stamp) > _LONGEST_STAMP:
            continue
        stream, _, text = rest.partition(b" ")
        try:
            at = float(stamp)
        except ValueError:  # a line torn by a power cut, or not written by orch
            continue
        if not 0 <= at <= LATEST_TIME or len(text) > LONGEST_READ_BYTES:
            continue
        yield LogEntry(
            at=at,
            attempt=file.attempt,
            rank=file.rank,
            stream="stderr" if stream.lower() == b"e" else "stdout",
            text=text.decode(errors="replace"),
        )
