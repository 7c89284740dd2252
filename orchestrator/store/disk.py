"""The disk under the store: its free space, and a reserve that is used when a running job's record needs it.

The reserve is a file of real blocks. When a transition meets a full disk, its blocks are moved to the store's own files
at once, so that a job that continues to write gets few of them. From then on, free blocks are held behind the ends of
those files, up to the reserve's size: also for the next daemon, which may start while the disk is still full.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from typing import TYPE_CHECKING

from orchestrator.store.records import DiskStatus, DiskTrouble

if TYPE_CHECKING:
    from pathlib import Path

RESERVE_BYTES = 4 * 1024 * 1024  # some hundred transitions, or thousands when they are committed in groups
_PAGE_BYTES = 4096
_PIECE_BYTES = 64 * 1024  # freed at a time when the reserve is moved: the most that another process can take
_OPENING_BYTES = 256 * 1024  # freed at a time until a store opens: space for its index of the log, and some pages
_LOG_BYTES = 4 * 1024 * 1024  # size of the log at which its content is moved into the file
MIN_FREE_INODES = 200  # a job with some attempts makes about as many files
MIN_FREE_BYTES = 64 * 1024 * 1024  # below this new work is refused: a job needs room for logs and checkpoints as well


class Disk:
    """Free space and the reserve; ``reserve`` None means no reserve. Used by the writer's thread, and by ``status``."""

    def __init__(self, path: Path, *, reserve: Path | None, reserve_bytes: int, min_free_bytes: int) -> None:
        self._path = path
        self._reserve = reserve
        self.reserve_bytes = reserve_bytes
        self._min_free_bytes = min_free_bytes
        self._lock = threading.Lock()
        self._drop_second_name()
        # An earlier daemon may have used the reserve on a disk that is still full.
        self._spent = not self.restore()

    def free_bytes(self) -> int:
        """Return the bytes that this user may still write."""
        stat = os.statvfs(self._path.parent)
        return stat.f_bavail * stat.f_frsize

    def status(self) -> DiskStatus:
        """Return the state of the disk, after recreating the reserve if there is space."""
        present = self.restore()
        free = self.free_bytes()
        found = os.statvfs(self._path.parent)
        trouble: DiskTrouble | None = None
        if found.f_flag & os.ST_RDONLY:
            trouble = DiskTrouble.READ_ONLY
        elif not present or free < self._min_free_bytes:
            trouble = DiskTrouble.FULL
        elif found.f_files and found.f_favail < MIN_FREE_INODES:  # a file system that makes them as needed counts none
            trouble = DiskTrouble.NO_INODES
        return DiskStatus(free_bytes=free, reserve_present=present, trouble=trouble)

    def trouble(self) -> DiskTrouble | None:
        """Find out why a write failed, by another one; None where that succeeds."""
        try:
            with tempfile.TemporaryFile(dir=self._path.parent, prefix=".probe-") as probe:
                probe.write(bytes(_PAGE_BYTES))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as error:
            return trouble_of(error, self._path.parent) or DiskTrouble.FAILING
        return None

    def restore(self) -> bool:
        """Create the reserve if it is missing and space is ample; return whether it exists (or none is configured)."""
        with self._lock:
            return self._reserve is None or self._restore(self._reserve)

    def _restore(self, reserve: Path) -> bool:
        if _size(reserve) >= self.reserve_bytes:
            return True
        if self.free_bytes() < self._min_free_bytes + self.reserve_bytes:
            return False
        draft = reserve.with_name(reserve.name + ".new")
        try:
            _allocate(draft, self.reserve_bytes)
            draft.replace(reserve)
        except OSError:
            draft.unlink(missing_ok=True)
            return False
        self._spent = False
        return True

    def give_up_piece(self) -> bool:
        """Free some of the reserve's blocks, for a store that is being opened; False when no reserve is left.

        Call ``hold_again`` once it is open.
        """
        left = -1 if self._reserve is None else _size(self._reserve)
        if self._reserve is None or left < 0:
            return False
        self._spent = True
        if left > _OPENING_BYTES:
            os.truncate(self._reserve, left - _OPENING_BYTES)
        else:
            self._reserve.unlink()
        return True

    def keep_blocks(self, path: Path, log: Path, used_bytes: int) -> None:
        """Turn the held blocks into a reserve for the next daemon, if it is not complete; called before the store closes.

        Closing truncates the file to the ``used_bytes`` and removes the log; blocks that are free in between could be
        taken. So the log takes over all blocks, and gets a second name.
        """
        if not self._spent or self._reserve is None or _size(log) < 0:
            return
        with contextlib.suppress(OSError):  # a reserve that cannot be kept is created again later
            if _size(self._reserve) >= 0:
                self._move(self._reserve, log, down_to=0)
                self._reserve.unlink()
            self._move(path, log, down_to=used_bytes)
            os.link(log, self._reserve)

    def _move(self, source: Path, target: Path, *, down_to: int) -> None:
        """Truncate blocks at the end of one file and hold them behind the end of another, piece by piece."""
        left = _size(source)
        while left > down_to:
            piece = min(_PIECE_BYTES, left - down_to)
            left -= piece
            os.truncate(source, left)
            self.hold(target, piece)

    def _drop_second_name(self) -> None:
        """Remove the second name of a log that was to become the reserve: it is still the log."""
        with contextlib.suppress(FileNotFoundError):
            if self._reserve is not None and self._reserve.stat().st_nlink > 1:
                self._reserve.unlink()

    def hand_over(self, path: Path, log: Path) -> bool:
        """Move the reserve's blocks to the file and its log, piece by piece; False when no reserve is left.

        The log gets its share, less its present size, as it restarts in its own blocks; the file, which grows, gets the rest.
        """
        if self._reserve is None or _size(self._reserve) < 0:
            return False
        self._spent = True
        for_log = self._log_lacks(log)
        # The rest becomes free when the file is removed.
        with contextlib.suppress(OSError), self._reserve.open("rb+") as reserve:
            left = os.fstat(reserve.fileno()).st_size
            while left > 0:
                piece = min(_PIECE_BYTES, left)
                left -= piece
                os.ftruncate(reserve.fileno(), left)
                self.hold(log if for_log > 0 else path, piece)
                for_log -= piece
        self._reserve.unlink()
        return True

    @property
    def is_spent(self) -> bool:
        """Whether the reserve was used and does not exist again."""
        return self._spent

    def hold(self, path: Path, size_bytes: int) -> None:
        """Hold up to ``size_bytes`` of free blocks behind the end of the file or its log, while the reserve is used.

        SQLite ignores zeros there: a file may be longer than its header says, and no frame of a log has a salt of
        zeros. A checkpoint truncates them off the file, so they are held anew after each.
        """
        if not self._spent:
            return
        size = min(size_bytes, self.free_bytes()) // _PAGE_BYTES * _PAGE_BYTES
        if size <= 0:
            return
        with contextlib.suppress(OSError):  # another process took the blocks; the next write then fails
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.posix_fallocate(fd, os.fstat(fd).st_size, size)
            finally:
                os.close(fd)

    def hold_again(self, path: Path, log: Path, used_bytes: int) -> None:
        """Hold free blocks, up to the reserve's size: the log's share, and the rest behind the ``used_bytes`` of the file."""
        self.hold(log, self._log_lacks(log))
        self.hold(path, self.reserve_bytes - max(0, _size(path) - used_bytes))

    def _log_lacks(self, log: Path) -> int:
        return max(0, min(self.reserve_bytes // 2, _LOG_BYTES) - max(0, _size(log)))


def trouble_of(error: BaseException, directory: Path) -> DiskTrouble | None:
    """Return what an error says about the disk under ``directory``; None where it says nothing about a disk."""
    match getattr(error, "errno", None):
        case errno.ENOSPC:
            with contextlib.suppress(OSError):
                found = os.statvfs(directory)
                if found.f_files and not found.f_favail and found.f_bavail:
                    return DiskTrouble.NO_INODES
            return DiskTrouble.FULL
        case errno.EDQUOT | errno.EFBIG:
            return DiskTrouble.FULL
        case errno.EIO | errno.ENXIO | errno.ENODEV:
            return DiskTrouble.FAILING
        case errno.EROFS:
            return DiskTrouble.READ_ONLY
        case _:
            return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _allocate(path: Path, size_bytes: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)
