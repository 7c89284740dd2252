"""The lock of the process that writes a rank's snapshots. Standard library only."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from orchestrator.private_files import make_private

if TYPE_CHECKING:
    from pathlib import Path


class SnapshotUnavailableError(Exception):
    """Shared memory cannot be used for this snapshot; it is saved to storage directly instead."""


class WriterLock:
    """Held for its lifetime by the process that writes a rank's slots.

    A POSIX record lock: the kernel frees it with the process, and forked children do not inherit it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises SnapshotUnavailableError when another live process has it, or its file cannot be created."""
        try:
            make_private(self._path.parent)
            handle = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SnapshotUnavailableError(f"{self._path.parent} cannot be used for snapshots: {error}") from error
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            raise SnapshotUnavailableError(f"another live process writes the snapshots of {self._path.stem}") from error
        self._handle = handle

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
