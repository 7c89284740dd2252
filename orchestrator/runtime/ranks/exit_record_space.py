"""Preallocates exit records: each rank has space for its current attempt's record, and the next one's, on a full disk.

The space is a file of real blocks beside the record, ``rank-0.json.room``; the keeper writes it in place and renames
it. Directories take space too, so an attempt prefers an existing one to a new one: the one created ahead, or that of an
attempt whose records are not needed any more and are overwritten. On a disk that stays full the same blocks are thus
reused, and a job that restarts thousands of times keeps the records of its last two attempts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from typing import TYPE_CHECKING, Final

from orchestrator import trees
from orchestrator.private_files import make_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUFFIX: Final = ".room"  # as in forkserver/keeper.py, which imports nothing of this package
SPACE_BYTES: Final = 16 * 1024
_AHEAD: Final = ".ahead"
_ATTEMPT: Final = re.compile(r"attempt-(\d+)")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_LOCK_SECONDS: Final = 1.0
_LOCK_POLL_SECONDS: Final = 0.001


def preallocate(record: Path) -> None:
    """Preallocate the exit record of an attempt that is about to start, and that of the next one.

    On a full disk, as much as possible is preallocated. Raises OSError for other errors.
    """
    _make_directory(record.parent.parent)
    with _directory_lock(record.parent.parent):
        _preallocate(record)


@contextlib.contextmanager
def _directory_lock(exits: Path) -> Iterator[None]:
    """Hold the lock for moving directories in ``exits``: without it, one rank could take what another one uses.

    After ``_LOCK_SECONDS`` the caller continues without the lock. It is on the directory itself: on a full disk there
    may be no space for a file.
    """
    try:
        handle = os.open(exits, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # the directory could not be created: no space
        yield
        return
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _locked(handle) and time.monotonic() < deadline:
            time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system cannot lock directories
        return True
    return True


def _preallocate(record: Path) -> None:
    folder = record.parent
    number = _number(folder)
    if _make_attempt(folder, below=number - 1):
        make_private(folder)  # a rank may have created a link there
        space = record.with_name(record.name + SUFFIX)
        with contextlib.suppress(FileNotFoundError):
            record.replace(space)  # from an earlier start of the same attempt
        _ = _allocate(space) or _take_oldest(space, record.name, below=number - 1)
    ahead = folder.with_name(_AHEAD)
    there = ahead.is_dir() and not ahead.is_symlink()
    if there or _move_oldest(ahead, below=number - 1) or _make_directory(ahead):
        space = ahead / (record.name + SUFFIX)
        if not (_allocate(space) or _take_oldest(space, record.name, below=number - 1)):
            with contextlib.suppress(OSError):  # it may hold files of other ranks
                ahead.rmdir()


def _make_attempt(folder: Path, *, below: int) -> bool:
    return (
        folder.is_dir()
        or _move(folder.with_name(_AHEAD), folder)
        or _move_oldest(folder, below=below)
        or _make_directory(folder)
    )


def _make_directory(folder: Path) -> bool:
    try:
        make_private(folder)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        return False
    return True


def _move_oldest(folder: Path, *, below: int) -> bool:
    """Reuse the directory of the oldest attempt before ``below``; False where there is none."""
    old = _old(folder.parent, below)
    return bool(old) and _move(old[0], folder)


def _take_oldest(space: Path, name: str, *, below: int) -> bool:
    """Reuse the rank's record of an attempt before ``below``, or its unused space, as ``space``."""
    for folder in _old(space.parent.parent, below):
        for path in (folder / name, folder / (name + SUFFIX)):
            with contextlib.suppress(FileNotFoundError):
                path.replace(space)
                return True
    return False


def _old(exits: Path, below: int) -> list[Path]:
    """Return directories of attempts before ``below``, the oldest first."""
    found = sorted((_number(path), path) for path in exits.glob("attempt-*"))
    return [path for number, path in found if 0 < number < below]


def _move(source: Path, folder: Path) -> bool:
    """Turn another directory into ``folder``, its records into space for new ones; False when it no longer exists.

    Until no old record is left in it, it has a name that readers skip.
    """
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    if source.is_symlink():
        return False
    try:
        source.rename(draft)
    except OSError:
        return False
    for path in list(draft.glob("*.json")):
        path.replace(path.with_name(path.name + SUFFIX))
    try:
        draft.rename(folder)
    except OSError:  # another rank of the attempt has created it
        trees.remove(draft)
    return folder.is_dir()


def _number(folder: Path) -> int:
    found = _ATTEMPT.fullmatch(folder.name)
    return int(found[1]) if found else 0


def _allocate(space: Path) -> bool:
    """Allocate as much space as there is, up to ``SPACE_BYTES``; False, and no file, where there is none."""
    try:
        handle = os.open(space, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        return False
    try:
        os.posix_fallocate(handle, 0, SPACE_BYTES)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        if os.fstat(handle).st_size == 0:
            space.unlink(missing_ok=True)
            return False
    finally:
        os.close(handle)
    return True
