"""The lock of a job's rank on its node, and the end of what a rank left when its keeper was killed.

The keeper of a live process tree holds the lock, so it shows whether the tree lives. The file's content (forkserver/holder.py) names the
tree. A free lock whose file is not empty means that the keeper was killed: its tree may still live, and its memory may still be being freed.
``end_remains`` then ends what is left.

It finds the tree's processes by its lock file (the process, its session, its control group), by the mark in their
environments, and by parentage. Needs no process that survives the keeper: a rank's actor, a new one, or the node's
agent can each do all of it. A process counts as left while the kernel frees its memory. Blocking; call it from a
thread.

Not found, without control groups: a process that left its session, was started with another environment, and has
lost its parent, if both the fork server and the keeper were killed. While either lives, parentage finds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.private_files import NotPrivateError, open_private
from orchestrator.runtime.forkserver import holder, linux
from orchestrator.runtime.forkserver.cgroups import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from orchestrator.runtime.forkserver.holder import Holder, Identity

_SUFFIX = ".lock"
KEEPER_SECONDS: Final = 30.0
"""Time that a keeper that was ordered to end its tree may take, which includes freeing its memory."""

_CLEAR_SECONDS: Final = 20.0
_FIRST_PAUSE_SECONDS: Final = 0.002
_LONGEST_PAUSE_SECONDS: Final = 0.1
_ENDED: Final = ("Z", "X")


def rank_lock_path(node_dir: Path, job_id: str, rank: int) -> Path:
    """Return the lock file of a job's rank on a node."""
    return node_dir / "ranks" / f"{job_id}.{rank}{_SUFFIX}"


def tree_mark(node_dir: Path, job_id: str, rank: int) -> str:
    """Return the value of ``holder.MARK`` in the environment of a rank's processes: the daemon's name, job and rank."""
    return f"{node_dir.parent.name}/{job_id}/{rank}"


def mark_of(path: Path) -> str:
    """Return the mark of the tree with the lock file ``path``."""
    job_id, _, rank = path.name.removesuffix(_SUFFIX).rpartition(".")
    return tree_mark(path.parent.parent, job_id, int(rank) if rank.isdigit() else 0)


def job_of(path: Path) -> str:
    """Return the job with the lock file ``path``."""
    return path.name.removesuffix(_SUFFIX).rpartition(".")[0]


def lock_files(node_dir: Path) -> list[Path]:
    """Return every lock file of a node."""
    return sorted((node_dir / "ranks").glob(f"*{_SUFFIX}"))


def open_lock(path: Path) -> int:
    """Open the lock file, created if missing; not a link, and not inherited."""
    return open_private(path, os.O_RDWR | os.O_CREAT)


def try_lock(handle: int, path: Path) -> bool:
    """Take the lock on ``handle``, unless a tree holds it or the file at ``path`` was replaced."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return is_current(handle, path)


def is_current(handle: int, path: Path) -> bool:
    """Whether the file at ``path`` is still the one that ``handle`` refers to: neither removed nor replaced."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int | None]:
    """Open an existing lock file; None when there is none."""
    try:
        handle = open_private(path, os.O_RDWR)
    except (FileNotFoundError, NotPrivateError):
        yield None  # there is no lock of this user
        return
    try:
        yield handle
    finally:
        os.close(handle)


def lock_is_free(path: Path) -> bool:
    """Whether no process tree of that rank has a keeper on this node."""
    with opened(path) as handle:
        if handle is None:
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def lock_is_clear(path: Path) -> bool:
    """Whether no process tree of that rank has a keeper on this node, and the last one ended under its keeper."""
    with opened(path) as handle:
        return handle is None or (holder.is_clear(handle) and lock_is_free(path))


def remove_locks(node_dir: Path, job_id: str) -> None:
    """Remove the lock files of an ended job; one of a tree that still has processes stays for ``clear_locks``."""
    for path in (node_dir / "ranks").glob(f"{job_id}.*{_SUFFIX}"):
        with contextlib.suppress(OSError), opened(path) as handle:
            if handle is not None and holder.is_clear(handle) and try_lock(handle, path):
                path.unlink()


def read_holder(path: Path) -> holder.Holder | None:
    """Return the lock file's record of the tree; None when it ended under its keeper, or is unknown."""
    with opened(path) as handle:
        return None if handle is None else holder.read(handle)


# -- what a killed keeper left


class _Process(NamedTuple):
    parent: int
    session: int
    state: str
    started: int


def end_remains(path: Path, seconds: float) -> bool:
    """End what is left of the tree with the lock file ``path``; False when some of it is left after ``seconds``.

    Does nothing while the lock is held: the keeper then ends the tree.
    """
    with opened(path) as handle:
        if handle is None or holder.is_clear(handle):
            return True
        if not try_lock(handle, path):
            return False
        return _end_locked(handle, path, seconds)


def end_locked_remains(handle: int, path: Path, seconds: float) -> bool:
    """Like ``end_remains``, for a caller that holds the lock."""
    return holder.is_clear(handle) or _end_locked(handle, path, seconds)


def _end_locked(handle: int, path: Path, seconds: float) -> bool:
    found, mark = holder.read(handle), mark_of(path)
    if not _until(lambda: _kill_found(found, mark), seconds):
        return False
    holder.clear(handle)
    return True


def _until(met: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition is met; return False when it is not after ``seconds``."""
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    while not met():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
    return True


def _kill_found(found: Holder | None, mark: str) -> bool:
    """Kill every process found; return whether there was none."""
    group = None if found is None or found.group is None else Group.open(found.group)
    if group is not None:
        group.kill()
    left = remains(found, mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return (group is None or group.remove()) and not left


def remains(found: Holder | None, mark: str) -> set[int]:
    """Return the processes of a tree that live, or still have memory that is being freed."""
    processes = _processes()
    members = {pid for pid, process in processes.items() if _belongs(pid, process, processes, found, mark)}
    more = members
    while more:
        more = {pid for pid, process in processes.items() if process.parent in more} - members
        members |= more
    return {pid for pid in members if processes[pid].state not in _ENDED} - {os.getpid()}


def _belongs(pid: int, process: _Process, processes: Mapping[int, _Process], found: Holder | None, mark: str) -> bool:
    if found is not None and _in_session(pid, process, processes, found.process):
        return True
    return mark.encode() == _mark(pid)


def _in_session(pid: int, process: _Process, processes: Mapping[int, _Process], leader: Identity) -> bool:
    """Whether the process is the tree's first one, or in that one's session."""
    if process.session != leader.pid:
        return False
    now = processes.get(leader.pid)
    # A session's number is not reused while the session has a member.
    return process.started >= leader.started and (now is None or now.started == leader.started or pid == leader.pid)


def _mark(pid: int) -> bytes | None:
    """Return the mark of a process; None without one, for another user's process, or once its memory is freed."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    prefix = f"{holder.MARK}=".encode()
    for variable in variables.split(b"\0"):
        if variable.startswith(prefix):
            return variable.removeprefix(prefix)
    return None


def _processes() -> dict[int, _Process]:
    """Return all processes of this user."""
    own, found = os.getuid(), {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                if entry.stat().st_uid != own:
                    continue
                fields = linux.stat_fields(int(entry.name))
                found[int(entry.name)] = _Process(int(fields[1]), int(fields[3]), fields[0].decode(), int(fields[19]))
    return found


def end_tree(path: Path, seconds: float, *, limit: float = KEEPER_SECONDS) -> bool:
    """End a tree that no attempt needs any more, with or without a keeper; False when some of it is left after ``seconds``.

    The rank's actor has ended, so the keeper must end everything; after ``limit`` seconds it is killed.
    """
    began = time.monotonic()
    if not _until(lambda: lock_is_free(path), min(limit, seconds)):
        found = read_holder(path)
        if found is not None:
            kill_process(found.keeper)
        _until(lambda: lock_is_free(path), began + seconds - time.monotonic())
    return end_remains(path, max(began + seconds - time.monotonic(), 0.0))


def kill_process(process: Identity) -> None:
    """Send SIGKILL to exactly this process, unless it has ended."""
    handle = process.open()
    if handle is not None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def clear_locks(node_dir: Path, live: Collection[str], young_seconds: float = 60.0) -> None:
    """Remove the lock files of jobs that are not ``live``, and end what is left of their ranks.

    A file younger than ``young_seconds`` stays: it may belong to a job that started after ``live`` was read.
    """
    now = time.time()
    for path in lock_files(node_dir):
        with contextlib.suppress(OSError):
            if job_of(path) not in live and now - path.lstat().st_ctime >= young_seconds:
                _remove_lock(path)


def _remove_lock(path: Path) -> None:
    """Remove a lock file. A start that waits for it notices (``is_current``) and fails; the next makes a new one."""
    with opened(path) as handle:
        if handle is not None and try_lock(handle, path) and end_locked_remains(handle, path, _CLEAR_SECONDS):
            path.unlink()
