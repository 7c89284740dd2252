"""Space and inodes kept for the start of a daemon, and of its Ray, on a full disk; the store has a reserve of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from orchestrator import trees

if TYPE_CHECKING:
    from orchestrator.spec.paths import Paths

START_BYTES: Final = 4 * 1024 * 1024
START_FILES: Final = 150
AMPLE_BYTES: Final = 128 * 1024 * 1024
AMPLE_FILES: Final = 1000


def keep_start_reserve(paths: Paths) -> None:
    """Reserve space and inodes for a later start on a full disk, where there are enough of both."""
    free = os.statvfs(paths.home)
    scarce = free.f_bavail * free.f_frsize < AMPLE_BYTES or (free.f_files and free.f_favail < AMPLE_FILES)
    if scarce or paths.start_reserve.exists():
        return
    paths.start_reserve.mkdir(mode=0o700)
    with (paths.start_reserve / "space").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, START_BYTES)
    for number in range(START_FILES):
        (paths.start_reserve / str(number)).touch(mode=0o600)


def release_start_reserve(paths: Paths) -> None:
    """Give up the reserve where the disk has too little for the daemon's own files, and Ray's."""
    free = os.statvfs(paths.home)
    if free.f_bavail * free.f_frsize < START_BYTES or (free.f_files and free.f_favail < START_FILES):
        trees.remove(paths.start_reserve)
