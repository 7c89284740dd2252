"""Reserves space in a directory: small files of real blocks, for files that must be written while the disk is full.

A spare is overwritten in place, where its blocks are, and gets its new name by a link or a rename. The file that it
replaces, or a removed one, becomes the next spare, and its blocks are never free in between: another program that
writes all the time cannot take the space, which can be used any number of times.

Only for files of at most one block; a longer one needs free space beyond the first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DIRECTORY: Final = ".spares"
COUNT: Final = 4
SPARE_BYTES: Final = 16 * 1024
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_LOCK_SECONDS: Final = 5.0
_LOCK_POLL_SECONDS: Final = 0.005


class Spares:
    """The spares of the directory ``root``. Used by several processes at once."""

    def __init__(self, root: Path, *, file_mode: int = 0o644, folder_mode: int = 0o755) -> None:
        self._root = root
        self._file_mode, self._folder_mode = file_mode, folder_mode
        self._directory = root / DIRECTORY

    @property
    def exist(self) -> bool:
        """Whether there is a directory of spares, empty or not."""
        return self._directory.is_dir()

    def keep(self) -> None:
        """Create up to ``COUNT`` spares of full size, as space permits. Never raises."""
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=self._folder_mode, exist_ok=True)
            with self._alone():
                for path in self._paths():
                    _allocate(path)
                for _ in range(COUNT - len(self._paths())):
                    self._add()

    def create(self, target: Path, content: bytes) -> bool:
        """Create ``target`` from a spare; False, and nothing changed, when it exists. ENOSPC when there is none."""
        with self._alone():
            if target.exists():  # several processes may create the same file, and there are few spares
                return False
            spare = self._written(content)
            try:
                os.link(spare, target)
            except FileExistsError:
                return False
            spare.unlink()
        return True

    def replace(self, target: Path, content: bytes) -> None:
        """Create or replace ``target`` from a spare; the old file becomes a spare. ENOSPC when there is none."""
        with self._alone():
            spare = self._written(content)
            with contextlib.suppress(OSError):  # there is no such file yet, or the file system has no links
                os.link(target, self._new_name())
            spare.replace(target)

    def take_in(self, path: Path) -> bool:
        """Make a spare of a file that would be removed, where one is missing; return whether that was done."""
        try:
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode) or not 0 < found.st_size <= SPARE_BYTES or found.st_nlink != 1:
                return False
            if not self._directory.is_dir():
                return False
            with self._alone():
                if len(self._paths()) >= COUNT:
                    return False
                path.rename(self._new_name())
        except OSError:
            return False
        return True

    def _written(self, content: bytes) -> Path:
        """Return the longest unused spare, with this content. Raises OSError with ENOSPC."""
        for path in self._paths():
            if path.lstat().st_nlink != 1:  # an interrupted replacement: this is another name of a file in use
                path.unlink()
                continue
            _overwrite(path, content)
            return path
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._root))

    def _paths(self) -> list[Path]:
        """Return the spares, the longest unused first: readers of its former content have long ended."""
        try:
            return sorted(path for path in self._directory.iterdir() if stat.S_ISREG(path.lstat().st_mode))
        except FileNotFoundError:
            return []

    def _new_name(self) -> Path:
        return self._directory / f"{time.time_ns():020d}-{secrets.token_hex(4)}"

    def _add(self) -> None:
        path = self._new_name()
        path.touch(mode=self._file_mode, exist_ok=False)
        try:
            _allocate(path)
        except OSError:
            path.unlink()
            raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other processes, where the file system can; with a timeout, because a process may be stopped."""
        handle = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        deadline = time.monotonic() + _LOCK_SECONDS
        try:
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(_LOCK_POLL_SECONDS)
                except OSError:  # a file system without locks
                    break
                else:
                    break
            yield
        finally:
            os.close(handle)


def _allocate(path: Path) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_size < SPARE_BYTES and os.fstat(handle).st_nlink == 1:
            os.posix_fallocate(handle, 0, SPARE_BYTES)
    finally:
        os.close(handle)


def _overwrite(path: Path, content: bytes) -> None:
    """Write in place without truncating the file first: another process could take the blocks in between."""
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        at = 0
        while at < len(content):
            at += os.pwrite(handle, content[at:], at)
        os.ftruncate(handle, len(content))
        os.fsync(handle)
    finally:
        os.close(handle)
