"""Opens files that other processes may have replaced: regular files only, without waiting, with a size limit.

A job's directory belongs to its ranks. In place of a log or a record there may be a FIFO without a writer, a device
without end, a link to another place, or a file of any size. Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_PIECE_BYTES = 1024 * 1024


class NotPlainFileError(OSError):
    """The path names no regular file, or one that is too large; nothing was read. ``strerror`` says which."""


def open_plain(path: Path, *, follow: bool = False, real: bool = False) -> int:
    """Open the regular file at ``path`` for reading and return its descriptor; the caller closes it. Never blocks.

    A link is followed only with ``follow``; what it leads to must be a regular file, too. With ``real`` no directory on the
    way is a link either: for files of a job, which may have replaced its own directory. Raises FileNotFoundError,
    NotPlainFileError, and OSError.
    """
    if not stat.S_ISREG(path.stat(follow_symlinks=follow).st_mode):  # merely opening some devices has an effect
        raise NotPlainFileError(errno.EINVAL, "it is not a regular file", str(path))
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link or a socket has just replaced it
            raise NotPlainFileError(error.errno, "it is not a regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotPlainFileError(errno.EINVAL, "it is not a regular file", str(path))
    if real and is_elsewhere(handle, path):
        os.close(handle)
        raise NotPlainFileError(errno.ELOOP, LINK_ON_THE_WAY, str(path))
    return handle


LINK_ON_THE_WAY: Final = "a directory on the way to it is a symbolic link, which is not followed; remove the link"


def is_elsewhere(handle: int, path: Path) -> bool:
    """Whether an open file or directory is in another directory than its path says: a directory on the way is a link.

    Only its directory is compared: the file may have another name, or none, by now.
    """
    there = os.readlink(f"/proc/self/fd/{handle}")  # noqa: PTH115 - Path is imported for type checkers only
    return there.rpartition("/")[0] != str(path.parent.absolute()).rstrip("/")


def read_plain(path: Path, most_bytes: int, *, follow: bool = False, real: bool = False) -> bytes:
    """Return the content of the regular file at ``path``. Raises what ``open_plain`` raises, and NotPlainFileError when too large."""
    handle = open_plain(path, follow=follow, real=real)
    try:
        refuse_larger(os.fstat(handle).st_size, most_bytes, str(path))
        data = bytearray()
        while len(data) <= most_bytes and (piece := os.read(handle, min(_PIECE_BYTES, most_bytes + 1 - len(data)))):
            data += piece
    finally:
        os.close(handle)
    refuse_larger(len(data), most_bytes, str(path))  # it grew meanwhile
    return bytes(data)


def refuse_larger(size: int, most_bytes: int, path: str) -> None:
    """Raise NotPlainFileError for a file at ``path`` that is larger than its reader takes."""
    if size > most_bytes:
        raise NotPlainFileError(errno.EFBIG, f"it has more than {most_bytes} bytes", path)
