"""The control socket: at most one daemon listens on it, and the socket of a dead one is replaced.

Owns its file and the lock beside it. The file is never accessible to more users than intended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.api.errors import RefusedError
from orchestrator.api.server.group_access import give_to_group, group_id
from orchestrator.api.transport import peer
from orchestrator.api.transport.endpoint import group_socket
from orchestrator.private_files import NotPrivateError, make_private

if TYPE_CHECKING:
    from collections.abc import Mapping

PREDECESSOR_SECONDS = 10.0
PREDECESSOR_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSocket:
    """The bound control socket, and the one for a group, if any. ``lock`` is held while this process serves, and names the process.

    ``inodes`` are those of the sockets' files.
    """

    sock: socket.socket
    group_sock: socket.socket | None
    lock: int
    inodes: Mapping[Path, int]

    @property
    def socks(self) -> list[socket.socket]:
        """The sockets."""
        return [self.sock] if self.group_sock is None else [self.sock, self.group_sock]

    def release(self) -> None:
        """Remove the files, if they are still this daemon's, and release the lock for the next daemon."""
        self.withdraw()
        os.close(self.lock)

    def withdraw(self) -> None:
        """Remove the files, if they are this daemon's; hold the lock until this process ends, which others wait for."""
        for sock in self.socks:
            sock.close()
        for path, inode in self.inodes.items():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()


def bind_control_socket(
    path: Path, *, group: str | None = None, predecessor_seconds: float = PREDECESSOR_SECONDS
) -> ControlSocket:
    """Listen on ``path`` with mode 0600, and for ``group`` on a socket of mode 0660 beside it.

    Connections wait in a queue of each socket: those of the owner do not wait behind those of members.
    A socket that a dead daemon left is replaced. Raises RefusedError if a live daemon listens, if the path is not a
    socket, or if other users could write to its directory; BadRequestError for an unknown group.
    Waits up to ``predecessor_seconds`` for a daemon that is stopping.
    """
    gid = None if group is None else group_id(group)
    _private_directory(path.parent, traversable=group is not None)
    lock = os.open(peer.lock_path(str(path)), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _take(lock, path, predecessor_seconds)
        peer.sign(lock)
        shared = path.with_name(Path(group_socket(str(path))).name)
        for each in (path, shared):
            _clear(each)
        sock, group_sock, inodes = _bind(path), None, {path: path.stat().st_ino}
        if gid is not None and group is not None:
            group_sock, inodes[shared] = _bind(shared), shared.stat().st_ino
            give_to_group(shared, gid, group, 0o660)
        return ControlSocket(sock=sock, group_sock=group_sock, lock=lock, inodes=inodes)
    except BaseException:
        os.close(lock)
        raise


def _private_directory(directory: Path, *, traversable: bool) -> None:
    try:
        make_private(directory, traversable=traversable)
    except NotPrivateError as error:
        raise RefusedError(
            f"no socket can be created where other users could place a false daemon: {error}",
            hint="set ORCH_HOME, or XDG_RUNTIME_DIR, to a directory of your own",
        ) from error


def _take(lock: int, path: Path, seconds: float) -> None:
    """Take the lock, or refuse; wait for a daemon that is stopping."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if _is_answered(path) or time.monotonic() > deadline:
                raise _in_use(path) from error
        time.sleep(PREDECESSOR_POLL_SECONDS)


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def _in_use(path: Path) -> RefusedError:
    return RefusedError(
        f"another daemon listens on {path}",
        hint="`orch down` stops it (jobs keep running); a second daemon needs its own ORCH_HOME",
    )


def _clear(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise RefusedError(f"{path} exists and is not a socket", hint="move it away and start again")
    if _is_answered(path):
        raise _in_use(path)
    path.unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        sock.bind(str(path))
        sock.listen(512)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(previous)
    return sock
