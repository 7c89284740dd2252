"""Copies of files that their script overwrites, so that a complete one exists while the next is being written.

A hard link costs nothing, but shares later writes to the file: it protects only from scripts that replace the file by a
new one. Until a script is known to do that, the file is cloned (where the file system can share blocks between files)
or copied.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from orchestrator.checkpoint.external.file_formats import open_regular

_FICLONE = 0x40049409  # linux/fs.h; Python has no name for it
_PIECE = 16 * 1024 * 1024
_NO_RANGES = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def take(source: str, target: Path, *, link: bool, most_bytes: int | None = None) -> None:
    """Copy the present content of ``source`` to ``target``, durably; by a hard link if allowed. Raises OSError.

    A file of more than ``most_bytes`` is only linked or cloned.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if link:
        with contextlib.suppress(OSError):  # another file system, or one without links
            os.link(source, target, follow_symlinks=False)
            return
    _copy(source, target, most_bytes)


def put_back(copy: Path, path: str) -> None:
    """Restore a copy to its file's place, atomically. The copy stays. Raises OSError."""
    draft = Path(f"{path}.orch-{os.getpid()}")
    try:
        _copy(str(copy), draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _copy(source: str, target: Path, most_bytes: int | None = None) -> None:
    with open_regular(source) as readable:
        facts = os.fstat(readable.fileno())
        mode = facts.st_mode & 0o700
        handle = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, mode or 0o600)
        try:
            if not _clone(readable.fileno(), handle):
                _check_room(target, facts.st_size, most_bytes)
                _copy_bytes(readable.fileno(), handle, facts.st_size)
            os.fsync(handle)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)


def _check_room(target: Path, size: int, most_bytes: int | None) -> None:
    if most_bytes is not None and size > most_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(target))
    free = os.statvfs(target.parent)
    if free.f_bavail * free.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))


def _clone(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def _copy_bytes(source: int, target: int, size: int) -> None:
    """Copy up to ``size`` bytes within the kernel, else through memory."""
    at, in_kernel = 0, True
    while at < size:
        count = min(_PIECE, size - at)
        if in_kernel:
            try:
                done = os.copy_file_range(source, target, count, at, at)
            except OSError as error:
                if at or error.errno not in _NO_RANGES:
                    raise
                in_kernel = False
                continue
        else:
            done = os.pwrite(target, os.pread(source, count, at), at)
        if done == 0:
            return
        at += done
