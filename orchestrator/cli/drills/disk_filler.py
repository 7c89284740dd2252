"""A file that temporarily takes all free space of a file system, for the drill of a full disk.

The file has no name. The kernel frees its blocks when the process that holds it ends in any way: Ctrl-C or SIGKILL
leave nothing behind. No file is created if a full disk would affect others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from orchestrator.api.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

MUCH_BYTES = 1024**3  # more than this is taken only with --yes
LOCAL_KINDS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"})
COMMON_PLACES = ("/", "/tmp", "/var", "/var/tmp", "/run", "/dev/shm")  # noqa: S108 - orch does not write there
_PIECES = (64 * 1024**2, 1024**2, 64 * 1024, 4096)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REMEDY = "give the job a checkpoint.storage_path on a small file system of its own"


def refuse_to_fill(
    directory: Path, *, much: bool, common: Sequence[str] | None = None, much_bytes: int = MUCH_BYTES
) -> int:
    """Return the bytes that fill the file system of ``directory``. Raises RefusedError if that would affect others.

    ``much`` permits more than ``much_bytes``; ``common`` are directories that must not be filled (None: the usual).
    """
    device = directory.stat().st_dev
    for place in common if common is not None else (*COMMON_PLACES, str(Path.home())):
        with contextlib.suppress(OSError):
            if Path(place).stat().st_dev == device:
                raise RefusedError(
                    f"{directory} is on the file system of {place}, which other programs need", hint=_REMEDY
                )
    kind = file_system_kind(directory)
    if kind not in LOCAL_KINDS:
        raise RefusedError(
            f"{directory} is on {kind or 'an unknown'} file system, which others may share", hint=_REMEDY
        )
    free = _free_bytes(directory)
    if kind == "tmpfs" and free > _memory_available_bytes() // 2:
        raise RefusedError(f"filling {directory} would take half of the memory that is left", hint=_REMEDY)
    if free > much_bytes and not much:
        raise RefusedError(
            f"filling {directory} takes {free / 1024**3:.1f} GiB until the drill is over",
            hint=f"pass --yes to proceed; or {_REMEDY}",
        )
    return free


def file_system_kind(path: Path) -> str:
    """Return the kernel's name of the file system of ``path``; empty if unknown."""
    target, best, kind = str(path.resolve()), "", ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        where = before.split()[4].encode().decode("unicode_escape")
        inside = target == where or target.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(best):
            best, kind = where, after.split()[0]
    return kind


class DiskFiller:
    """A context manager that takes the space of a disk and frees it at the end."""

    def __init__(self, directory: Path) -> None:
        self._fd = _nameless(directory)
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._fd)

    def fill(self) -> int:
        """Take all free space, again at each call; return the bytes held. Raises OSError, but not for a full disk."""
        for piece in _PIECES:
            while self._grow(piece):
                pass
        return self.size_bytes

    def _grow(self, size: int) -> bool:
        try:
            os.posix_fallocate(self._fd, self.size_bytes, size)
        except OSError as error:
            if error.errno in _FULL:
                return False
            raise
        self.size_bytes += size
        return True


def _nameless(directory: Path) -> int:
    with contextlib.suppress(OSError):  # not every file system supports files without a name
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    handle, name = tempfile.mkstemp(prefix=".orch-drill-", dir=directory)
    Path(name).unlink()
    return handle


def _free_bytes(directory: Path) -> int:
    stat = os.statvfs(directory)
    return (stat.f_bfree if os.geteuid() == 0 else stat.f_bavail) * stat.f_frsize


def _memory_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
