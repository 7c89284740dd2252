"""The store's lock: an flock on a file beside it, which also names its holder."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from orchestrator.store.disk import trouble_of
from orchestrator.store.errors import StoreInUseError, StoreUnreadableError, refused_by_disk

if TYPE_CHECKING:
    from pathlib import Path


class StoreLock:
    """Exclusive use of a store, held from construction until ``release`` or the end of the process.

    Raises StoreInUseError, StoreUnreadableError and DiskFullError. The file stays: removing it would let two processes
    hold two files of the same name.
    """

    def __init__(self, store_path: Path) -> None:
        self._path = store_path.with_name(store_path.name + ".lock")
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if (trouble := trouble_of(error, store_path.parent)) is not None:
                raise refused_by_disk(store_path, "so the store cannot be opened", trouble) from error
            raise StoreUnreadableError(store_path, f"{self._path.name}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = self._holder()
            os.close(self._fd)
            self._fd = -1
            raise StoreInUseError(store_path, pid) from error
        self._write_owner()

    def release(self) -> None:
        """Release the lock. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @staticmethod
    def is_held(store_path: Path) -> bool:
        """Whether a process holds the store at ``store_path``."""
        try:
            handle = os.open(store_path.with_name(store_path.name + ".lock"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    @staticmethod
    def holder(store_path: Path) -> int | None:
        """Return the process id in the lock file of the store at ``store_path``; None if no process holds the lock."""
        if not StoreLock.is_held(store_path):
            return None
        try:
            handle = os.open(store_path.with_name(store_path.name + ".lock"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return _noted(handle)
        finally:
            os.close(handle)

    def _holder(self) -> int | None:
        return _noted(self._fd)

    def _write_owner(self) -> None:
        # Written in place and padded, so that a full disk does not prevent a daemon's start: the block exists after the first
        # time. Only people read it.
        try:
            os.pwrite(self._fd, f"{os.getpid()}\n".encode().ljust(32), 0)
        except OSError:
            return


def _noted(handle: int) -> int | None:
    text = os.pread(handle, 32, 0).split(b"\n", 1)[0].strip()
    return int(text) if text.isdigit() else None
