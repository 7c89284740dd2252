"""Walks, copies and removes directory trees that a job or another user has written.

Such a tree may be a hundred thousand levels deep, have paths longer than the kernel accepts, hold millions of files,
directories without permissions or mounted file systems, and change meanwhile. ``os.walk``, ``os.fwalk``, ``Path.rglob``,
``shutil.copytree`` and ``shutil.rmtree`` call themselves for each level and end in RecursionError, which ``except
OSError`` does not catch. The functions here do not recurse, follow no link, open at most ``MAX_LEVELS`` descriptors,
stay on the file system of the tree's root, and raise nothing because of a tree's content: a ``Problems`` names what was not
read or removed, and why.

Standard library only, imports nothing of the project: the training process and the fork server use it.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import shutil
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LEVELS: Final = 100
"""Levels that a walk enters, and that a removal has open at once."""

MAX_ENTRIES: Final = 1_000_000
NAMED: Final = 5
"""Problems that are kept; further ones are counted."""

SHOWN: Final = 80
"""Characters of a path in a message."""

_BATCH: Final = 1000
_MAX_ROUNDS: Final = 10_000
_MAX_STUCK: Final = 10_000
_CHECK_EVERY: Final = 256
_OWNER: Final = 0o700
_LIST: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ENTER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Cause(enum.Enum):
    """Why a part of a tree was not read, copied or removed; the value is its wording."""

    SYSTEM = "refused by the operating system"
    DEEP = f"more than {MAX_LEVELS} directories deep"
    MANY = "too many files to list"
    SLOW = "not finished in time"
    MOUNTED = "another file system is mounted there"
    BUSY = "files are still being created there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A part of a tree that was not read, copied or removed: its path below the root (empty: the root), and why."""

    path: str
    cause: Cause
    errno: int = 0

    def __str__(self) -> str:
        """Return the problem in words, on one line whatever the file's name contains."""
        why = os.strerror(self.errno) if self.cause is Cause.SYSTEM else self.cause.value
        shown = self.path if len(self.path) <= SHOWN else f"{self.path[:SHOWN]}..."
        return f"{ascii(shown) if not shown.isprintable() else shown}: {why}" if shown else why


@dataclass(slots=True)
class Problems:
    """The first problems with a tree, and their number."""

    first: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, path: str, cause: Cause | OSError) -> None:
        """Count a problem."""
        self.count += 1
        if len(self.first) < NAMED:
            system = isinstance(cause, OSError)
            number = (cause.errno or errno.EIO) if isinstance(cause, OSError) else 0
            self.first.append(Problem(path=path, cause=Cause.SYSTEM if system else cause, errno=number))  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """Whether there is any problem."""
        return self.count > 0

    def __str__(self) -> str:
        """Return the problems in words."""
        more = f"; and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        return "; ".join(map(str, self.first)) + more

    def refuse(self, root: str | os.PathLike[str]) -> None:
        """Raise OSError for the first problem, if there is any."""
        if self.first:
            one = self.first[0]
            raise OSError(one.errno or errno.EIO, str(self), os.path.join(root, one.path) if one.path else str(root))


@dataclass(frozen=True, slots=True)
class Found:
    """An entry of a tree. ``folder`` is the descriptor of its directory, open until the walk continues."""

    path: str
    name: str
    folder: int
    status: os.stat_result

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return stat.S_ISREG(self.status.st_mode)

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return stat.S_ISDIR(self.status.st_mode)


@dataclass(slots=True)
class _Level:
    """A directory that is open. ``pending`` are the directories in it that come next, ``stuck`` those that cannot be removed."""

    handle: int
    path: str
    name: str = ""
    pending: list[str] = field(default_factory=list)
    stuck: set[str] = field(default_factory=set)
    rounds: int = 0

    def below(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name


def walk(
    root: str | os.PathLike[str] | int,
    problems: Problems,
    *,
    prefix: str = "",
    most_entries: int = MAX_ENTRIES,
    until: float | None = None,
) -> Iterator[Found]:
    """Yield every entry below a directory (a path, or a descriptor, which stays open), each directory before its content.

    Paths begin with ``prefix``. Adds to ``problems`` what cannot be listed, also the root itself. Ends at ``until`` (of ``time.monotonic``).
    """
    try:
        top = os.open(".", _LIST, dir_fd=root) if isinstance(root, int) else os.open(root, _LIST)
    except OSError as error:
        problems.add(prefix, error)
        return
    device = os.fstat(top).st_dev
    stack = [_Level(top, prefix)]
    count = 0
    try:
        listed = _list(stack[0], problems)
        while stack:
            for entry in listed:
                count += 1
                if count > most_entries:
                    problems.add(stack[-1].path, Cause.MANY)
                    return
                if until is not None and count % _CHECK_EVERY == 1 and time.monotonic() >= until:
                    problems.add(stack[-1].path, Cause.SLOW)
                    return
                if entry.is_directory:
                    stack[-1].pending.append(entry.name)
                yield entry
            if not stack[-1].pending:
                os.close(stack.pop().handle)
                continue
            below = _descend(stack, device, problems)
            if below is not None:
                stack.append(below)
                listed = _list(below, problems)
    finally:
        for level in stack:
            os.close(level.handle)


def _list(level: _Level, problems: Problems) -> Iterator[Found]:
    try:
        with os.scandir(level.handle) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    problems.add(level.below(entry.name), error)
                    continue
                yield Found(level.below(entry.name), entry.name, level.handle, status)
    except OSError as error:
        problems.add(level.path, error)


def _descend(stack: list[_Level], device: int, problems: Problems) -> _Level | None:
    """Open the next directory of the innermost level; None for one that cannot be entered."""
    level = stack[-1]
    name = level.pending.pop()
    path = level.below(name)
    if len(stack) >= MAX_LEVELS:
        problems.add(path, Cause.DEEP)
        return None
    try:
        handle = os.open(name, _LIST, dir_fd=level.handle)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.add(path, error)
        return None
    if os.fstat(handle).st_dev != device:
        os.close(handle)
        problems.add(path, Cause.MOUNTED)
        return None
    return _Level(handle, path, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a tree holds, as far as it could be read."""

    files: int
    bytes: int


def measure(root: str | os.PathLike[str], problems: Problems, *, until: float | None = None) -> Size:
    """Return the number of regular files below a directory and their bytes; one with several names counts once."""
    files = size = 0
    several: set[int] = set()
    for found in walk(root, problems, until=until):
        if not found.is_file or found.status.st_ino in several:
            continue
        if found.status.st_nlink > 1:
            several.add(found.status.st_ino)
        files, size = files + 1, size + found.status.st_size
    return Size(files=files, bytes=size)


def copy(
    source: str | os.PathLike[str], target: str | os.PathLike[str], problems: Problems, *, link: bool = False
) -> None:
    """Copy a tree to ``target``, which may exist: regular files (with ``link`` as hard links), directories, and links as they are.

    Leaves out sockets, devices and FIFOs. A file keeps its permission bits and times.
    """
    os.makedirs(target, exist_ok=True)
    for found in walk(source, problems):
        place = os.path.join(target, found.path)
        try:
            if found.is_directory:
                _make_directory(place)
            elif stat.S_ISLNK(found.status.st_mode):
                os.symlink(os.readlink(found.name, dir_fd=found.folder), place)
            elif found.is_file and link:
                os.link(found.name, place, src_dir_fd=found.folder, follow_symlinks=False)
            elif found.is_file:
                _copy_file(found, place)
        except OSError as error:
            problems.add(found.path, error)


def _make_directory(place: str) -> None:
    try:
        os.mkdir(place)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(place).st_mode):  # never through a link that has just been copied
            raise


def _copy_file(found: Found, place: str) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    create = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        os.fdopen(os.open(found.name, flags, dir_fd=found.folder), "rb") as original,
        os.fdopen(os.open(place, create, 0o600), "wb") as written,
    ):
        shutil.copyfileobj(original, written)
        os.fchmod(written.fileno(), stat.S_IMODE(found.status.st_mode) & 0o777)
    os.utime(place, ns=(found.status.st_atime_ns, found.status.st_mtime_ns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What was removed: files, and the bytes that this freed. ``left`` names what is still there."""

    files: int
    freed_bytes: int
    left: Problems


def remove(path: str | os.PathLike[str], *, dir_fd: int | None = None, until: float | None = None) -> Removal:
    """Remove a directory and all below it, or what else has this name (a link itself); nothing when it is absent.

    Gives this user's own directories the permissions that this needs. Ends at ``until`` (of ``time.monotonic``).
    """
    removing = _Removing(until)
    parent, name = os.path.split(os.path.normpath(path))
    try:
        here = os.open(parent or ".", _ENTER & ~os.O_NOFOLLOW, dir_fd=dir_fd)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        removing.left.add("", error)
    else:
        try:
            removing.remove(name, here)
        finally:
            os.close(here)
    return Removal(files=removing.files, freed_bytes=removing.freed_bytes, left=removing.left)


class _Removing:
    """One removal. A directory below ``MAX_LEVELS`` others moves to the root's own level, so the depth has no limit."""

    def __init__(self, until: float | None) -> None:
        self.left = Problems()
        self.files = 0
        self.freed_bytes = 0
        self._until = until
        self._calls = 0
        self._late = False
        self._moved = 0
        self._prefix = f".removing-{os.urandom(4).hex()}-"

    def remove(self, name: str, parent: int) -> None:
        top = _Level(parent, "", name)
        if not self._unlink(top, name, shown=""):
            return
        root = self._enter(top, name, shown="")
        if root is None:
            return
        device = os.fstat(root.handle).st_dev
        stack = [root]
        try:
            while stack:
                level = stack[-1]
                if not level.pending and level.rounds < _MAX_ROUNDS and len(level.stuck) < _MAX_STUCK:
                    level.rounds += 1
                    self._empty(level)
                if self._late:
                    self.left.add(level.path, Cause.SLOW)
                    return
                if level.pending:
                    self._go_on(stack, device)
                    continue
                stack.pop()
                os.close(level.handle)
                self._remove_empty(level, stack[-1] if stack else top)
        finally:
            for level in stack:
                os.close(level.handle)

    def _empty(self, level: _Level) -> None:
        """Unlink what is in a directory, but for the directories in it, of which some are noted."""
        try:
            with os.scandir(level.handle) as entries:
                fresh = (entry for entry in entries if entry.name not in level.stuck)
                for entry in fresh:
                    self._calls += 1
                    if self._until is not None and self._calls % _CHECK_EVERY == 1:
                        self._late = time.monotonic() >= self._until
                    if self._late or len(level.pending) >= _BATCH or len(level.stuck) >= _MAX_STUCK:
                        return
                    if entry.is_dir(follow_symlinks=False) or self._unlink(level, entry.name):
                        level.pending.append(entry.name)
        except OSError as error:
            self.left.add(level.path, error)
            level.rounds = _MAX_ROUNDS

    def _unlink(self, level: _Level, name: str, shown: str | None = None) -> bool:
        """Unlink a file; True when it is a directory."""
        try:
            status = os.stat(name, dir_fd=level.handle, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                return True
            os.unlink(name, dir_fd=level.handle)
        except FileNotFoundError:
            return False
        except IsADirectoryError:  # it has just been replaced
            return True
        except OSError as error:
            self._stuck(level, name, error, shown)
            return False
        self.files += 1
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            self.freed_bytes += status.st_size
        return False

    def _go_on(self, stack: list[_Level], device: int) -> None:
        """Enter the next directory of the innermost level, or move it up."""
        level = stack[-1]
        name = level.pending.pop()
        below = self._enter(level, name)
        if below is None:
            return
        if os.fstat(below.handle).st_dev != device:
            os.close(below.handle)
            self._stuck(level, name, Cause.MOUNTED)
        elif len(stack) < MAX_LEVELS:
            stack.append(below)
        else:
            os.close(below.handle)
            self._move_up(level, name, stack[0])

    def _move_up(self, level: _Level, name: str, root: _Level) -> None:
        self._moved += 1
        fresh = f"{self._prefix}{self._moved}"
        try:
            os.rename(name, fresh, src_dir_fd=level.handle, dst_dir_fd=root.handle)
        except FileNotFoundError:
            return
        except OSError as error:
            self._stuck(level, name, error)
            return
        root.pending.append(fresh)

    def _enter(self, level: _Level, name: str, shown: str | None = None) -> _Level | None:
        """Open a directory and give its owner, this user, all permissions; None if that is not possible."""
        path = level.below(name) if shown is None else shown
        try:
            try:
                handle = os.open(name, _LIST, dir_fd=level.handle)
            except PermissionError:
                permit(name, level.handle)
                handle = os.open(name, _LIST, dir_fd=level.handle)
        except (FileNotFoundError, NotADirectoryError):  # the next round unlinks what has replaced it
            return None
        except OSError as error:
            self._stuck(level, name, error, shown)
            return None
        mode = os.fstat(handle).st_mode
        if mode & _OWNER != _OWNER:
            with contextlib.suppress(OSError):  # another user's: what cannot be removed in it is reported
                os.fchmod(handle, stat.S_IMODE(mode) | _OWNER)
        return _Level(handle, path, name)

    def _remove_empty(self, level: _Level, above: _Level) -> None:
        try:
            os.rmdir(level.name, dir_fd=above.handle)
        except FileNotFoundError:
            return
        except OSError as error:
            above.stuck.add(level.name)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                self.left.add(level.path, error)
            elif not level.stuck and level.rounds <= _MAX_ROUNDS:
                self.left.add(level.path, Cause.BUSY)

    def _stuck(self, level: _Level, name: str, cause: Cause | OSError, shown: str | None = None) -> None:
        level.stuck.add(name)
        self.left.add(level.below(name) if shown is None else shown, cause)


def permit(name: str | os.PathLike[str], folder: int | None = None) -> None:
    """Give the owner, this user, all permissions of a directory that cannot be opened; a link is not followed. Raises OSError."""
    handle = os.open(name, _ENTER, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{handle}", _OWNER)  # fchmod does not accept such a descriptor
    finally:
        os.close(handle)
