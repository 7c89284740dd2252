"""Opens and checks directories and files that are private to one user, on a machine with other users.

`/tmp` and `/dev/shm` are open to every user: another user may already have created a directory, a link or a file under
any name. No function here follows a link at such a place. A path is walked from the root with descriptors; below a
directory that others can write to, a level counts as this user's only if it is a real directory, belongs to this user
(or to root, above the last level) and cannot be written by others. A passed check stays valid, because in a sticky
directory no other user can replace what belongs to this user.

Standard library and ``trees`` only: the training process and the command line use it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

PRIVATE_UMASK: Final = 0o077
_OTHERS: Final = 0o077
_OTHERS_READ_OR_WRITE: Final = 0o066
_OTHERS_WRITE: Final = 0o022
_ENTER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS: Final = 40


class NotPrivateError(PermissionError):
    """A directory or file that should be private to this user is not; the message names it and what to do."""


def make_private(path: Path, *, traversable: bool = False) -> Path:
    """Make the directory `path` private to this user (mode 0700); it and its parents are created.

    With `traversable`, others keep their right to traverse it. Raises NotPrivateError, OSError.
    """
    os.close(enter_private(path, make=True, traversable=traversable))
    return path


def check_private(path: Path) -> None:
    """Raise NotPrivateError when `path`, or a directory above it, is not private to this user. Creates nothing."""
    with contextlib.suppress(FileNotFoundError):
        os.close(enter_private(path))


def enter_private(path: Path, *, make: bool = False, traversable: bool = False) -> int:
    """Return a descriptor of the directory `path`, checked as `make_private` does; the caller closes it.

    Raises NotPrivateError; FileNotFoundError if it does not exist and `make` is not set.
    """
    handle = _enter_own(path, make=make)
    try:
        _tighten(handle, path, _OTHERS_READ_OR_WRITE if traversable else _OTHERS)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _tighten(handle: int, path: Path, unwanted: int) -> None:
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    if mode & stat.S_ISVTX:  # such as /tmp for root, which owns it
        raise NotPrivateError(f"{path} is a directory that users share; use one of your own")
    if mode & unwanted:
        os.fchmod(handle, mode & ~unwanted)


def _enter_own(path: Path, *, make: bool) -> int:
    found = _walk(os.fspath(path), make=make, links=0)
    try:
        return os.open(".", _LIST, dir_fd=found)
    finally:
        os.close(found)


def open_private(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open the regular file `path` of this user in a directory of this user, following no link.

    Raises NotPrivateError, OSError. The caller closes the descriptor.
    """
    folder = _enter_own(path.parent, make=False)
    try:
        return open_own_file(path.name, flags, mode, dir_fd=folder, shown=os.fspath(path))
    finally:
        os.close(folder)


def open_own_file(name: str, flags: int, mode: int, *, dir_fd: int | None = None, shown: str = "") -> int:
    """Open a regular file that belongs to this user, following no link in place of the file itself."""
    shown = shown or name
    try:
        handle = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivateError(f"{shown} is a symbolic link; remove it") from error
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(handle)
        raise NotPrivateError(f"{shown} is not a regular file of this user; remove it")
    return handle


def enter_below(base: Path, relative: str, *, make: bool = False) -> int:
    """Return a descriptor of the directory `relative` below `base`, with no link in the path, `base` itself included.

    A user who may write below `base` cannot make orch leave it. Raises ValueError for a path that leads out by its text
    or by a link, OSError otherwise. The caller closes the descriptor.
    """
    names = [name for name in relative.split("/") if name not in ("", ".")]
    if relative.startswith("/") or ".." in names:
        raise ValueError(f"{relative!r} leads out of {base}; nothing was read or written")
    here = _list_directory(os.fspath(base), None, os.fspath(base))
    shown = os.fspath(base)
    for name in names:
        shown = f"{shown}/{name}"
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=here)
            below = _list_directory(name, here, shown)
        finally:
            os.close(here)
        here = below
    return here


def _list_directory(name: str, dir_fd: int | None, shown: str) -> int:
    try:
        return os.open(name, _LIST, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise ValueError(f"{shown} is not a directory but a link or a file; remove it") from error
        raise


def remove_private(path: Path) -> None:
    """Remove the directory `path` of this user and all below it; do nothing if it is another user's or absent."""
    from orchestrator import trees  # every command imports this module

    try:
        folder = _enter_own(path, make=False)
    except OSError:
        return  # another user's, or absent
    try:
        for name in os.listdir(folder):
            trees.remove(name, dir_fd=folder)
    finally:
        os.close(folder)
    with contextlib.suppress(OSError):  # not empty: something in it could not be removed
        path.rmdir()


def _walk(path: str, *, make: bool, links: int) -> int:
    """Return a descriptor (O_PATH) of the directory, with every level checked."""
    names = [name for name in os.path.abspath(path).split("/") if name]
    here, shown = os.open("/", _ENTER), ""
    try:
        for number, name in enumerate(names):
            exposed = _is_open_to_others(os.fstat(here))
            below = _enter(name, here, f"{shown}/{name}", make=make)
            if below is None:  # a link, or a file
                target = _target(name, here, f"{shown}/{name}", exposed=exposed, links=links)
                rest = "/".join(names[number + 1 :])
                return _walk(os.path.join(shown or "/", target, rest), make=make, links=links + 1)
            os.close(here)
            here, shown = below, f"{shown}/{name}"
            _check(os.fstat(here), shown, exposed=exposed, last=number == len(names) - 1)
        return os.dup(here)
    finally:
        os.close(here)


def _enter(name: str, here: int, shown: str, *, make: bool) -> int | None:
    """Return a descriptor of the directory; None if its name is that of something else."""
    try:
        return os.open(name, _ENTER, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    try:
        os.mkdir(name, 0o700, dir_fd=here)
    except FileExistsError:
        pass  # another process of this user, or another user: the check decides
    except OSError as error:
        raise type(error)(error.errno, f"{shown} cannot be created: {error.strerror}") from error
    return _enter(name, here, shown, make=False)


def _target(name: str, here: int, shown: str, *, exposed: bool, links: int) -> str:
    """Return the target of a link that only this user or root can have created."""
    if not exposed and links < _MAX_LINKS:
        try:
            return os.readlink(name, dir_fd=here)
        except OSError as error:
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", shown) from error
    raise NotPrivateError(f"{shown} is not a directory but a link or a file, which any user can have made; remove it")


def _is_open_to_others(directory: os.stat_result) -> bool:
    """Return whether another user can create files in it; this user's own group counts as private."""
    mode = directory.st_mode
    return bool(mode & stat.S_IWOTH or (mode & stat.S_IWGRP and directory.st_gid != os.getegid()))


def _check(status: os.stat_result, shown: str, *, exposed: bool, last: bool) -> None:
    own = os.geteuid()
    if status.st_uid != own and (last or (exposed and status.st_uid != 0)):
        raise NotPrivateError(
            f"{shown} belongs to user {status.st_uid}, not to user {own}; remove it, or use another directory"
            " (ORCH_HOME, TMPDIR)"
        )
    shared = status.st_mode & _OTHERS_WRITE and not (status.st_mode & stat.S_ISVTX and not last)
    if exposed and shared:
        raise NotPrivateError(
            f"{shown} can be written by other users, who may have put files there; check what is in it, then remove it or"
            f" run: chmod go-rwx {shown}"
        )
