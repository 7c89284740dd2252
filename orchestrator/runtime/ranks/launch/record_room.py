"""Room for exit records: each rank has that of its current attempt, and of the next one, before the disk may be full.

A record's room is a file of real blocks beside it, ``rank-0.json.room``; the keeper writes it in place and renames it.
Directories take room too, so an attempt does not make its own where it can have another: the one that was made ahead, or
that of an attempt which is not needed any more, whose records become the room for new ones. So on a disk that stays
full the same blocks are used again and again, and a job that restarts thousands of times keeps the records of its last
two attempts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from typing import TYPE_CHECKING, Final

from orchestrator.private_files import make_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUFFIX: Final = ".room"  # as in forkserver/keeper.py, which imports nothing of this package
ROOM_BYTES: Final = 16 * 1024
_AHEAD: Final = ".ahead"
_ATTEMPT: Final = re.compile(r"attempt-(\d+)")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_LOCK_SECONDS: Final = 1.0
_LOCK_POLL_SECONDS: Final = 0.001


def make_room(record: Path) -> None:
    """Have room for the exit record of an attempt that is about to start, and ahead for the next one's.

    On a full disk what can be had. Raises OSError for other trouble.
    """
    _make_directory(record.parent.parent)
    with _alone(record.parent.parent):
        _make_room(record)


@contextlib.contextmanager
def _alone(exits: Path) -> Iterator[None]:
    """The only rank that moves directories in here: of two, each could lose what the other takes. Waits for a moment at most.

    The lock is on the directory itself: on a full disk there may be no room for a file.
    """
    try:
        handle = os.open(exits, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # there was no room for it
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
    except OSError:  # a file system that locks no directories
        return True
    return True


def _make_room(record: Path) -> None:
    folder = record.parent
    number = _number(folder)
    if _make_folder(folder, below=number - 1):
        make_private(folder)  # a rank may have put a link there
        room = record.with_name(record.name + SUFFIX)
        with contextlib.suppress(FileNotFoundError):
            record.replace(room)  # of an earlier start of the same attempt
        _ = _allocate(room) or _take_oldest(room, record.name, below=number - 1)
    ahead = folder.with_name(_AHEAD)
    there = ahead.is_dir() and not ahead.is_symlink()
    if there or _move_oldest(ahead, below=number - 1) or _make_directory(ahead):
        room = ahead / (record.name + SUFFIX)
        if not (_allocate(room) or _take_oldest(room, record.name, below=number - 1)):
            with contextlib.suppress(OSError):  # the rooms of other ranks may be in it
                ahead.rmdir()


def _make_folder(folder: Path, *, below: int) -> bool:
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
    """Take the directory of the oldest attempt before ``below``; False where there is none."""
    old = _old(folder.parent, below)
    return bool(old) and _move(old[0], folder)


def _take_oldest(room: Path, name: str, *, below: int) -> bool:
    """Make ``room`` of the rank's record of an attempt before ``below``, or of the room that it did not use."""
    for folder in _old(room.parent.parent, below):
        for path in (folder / name, folder / (name + SUFFIX)):
            with contextlib.suppress(FileNotFoundError):
                path.replace(room)
                return True
    return False


def _old(exits: Path, below: int) -> list[Path]:
    """Directories of attempts before ``below``, the oldest first."""
    found = sorted((_number(path), path) for path in exits.glob("attempt-*"))
    return [path for number, path in found if 0 < number < below]


def _move(source: Path, folder: Path) -> bool:
    """Make ``folder`` of another directory, its records room for new ones; False when it is not there any more.

    It has a name that is not read until no old record is left in it.
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
    except OSError:  # another rank of the attempt has made it
        shutil.rmtree(draft, ignore_errors=True)
    return folder.is_dir()


def _number(folder: Path) -> int:
    found = _ATTEMPT.fullmatch(folder.name)
    return int(found[1]) if found else 0


def _allocate(room: Path) -> bool:
    """Have as much room as there is, up to ``ROOM_BYTES``; False, and no file, where there is none."""
    try:
        handle = os.open(room, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        return False
    try:
        os.posix_fallocate(handle, 0, ROOM_BYTES)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        if os.fstat(handle).st_size == 0:
            room.unlink(missing_ok=True)
            return False
    finally:
        os.close(handle)
    return True
