"""The lock of a job's rank on its node: held by the keeper of a live process tree, so the kernel knows which trees live.

The file's content (forkserver/holder.py) names the tree. A free lock whose file is not empty means that the keeper was
killed: what it kept may live on, and its memory may still be being freed. ``rank_remains`` ends that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from orchestrator.private_files import NotPrivateError, open_private
from orchestrator.runtime.forkserver import holder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SUFFIX = ".lock"


def rank_lock_path(node_dir: Path, job_id: str, rank: int) -> Path:
    """The lock file of a job's rank on a node."""
    return node_dir / "ranks" / f"{job_id}.{rank}{_SUFFIX}"


def tree_mark(node_dir: Path, job_id: str, rank: int) -> str:
    """What ``holder.MARK`` is in the environment of a rank's processes: the daemon's name among others, job and rank."""
    return f"{node_dir.parent.name}/{job_id}/{rank}"


def mark_of(path: Path) -> str:
    """The mark of the tree whose lock file ``path`` is."""
    job_id, _, rank = path.name.removesuffix(_SUFFIX).rpartition(".")
    return tree_mark(path.parent.parent, job_id, int(rank) if rank.isdigit() else 0)


def job_of(path: Path) -> str:
    """The job whose lock file ``path`` is."""
    return path.name.removesuffix(_SUFFIX).rpartition(".")[0]


def lock_files(node_dir: Path) -> list[Path]:
    """Every lock file of a node."""
    return sorted((node_dir / "ranks").glob(f"*{_SUFFIX}"))


def open_lock(path: Path) -> int:
    """The lock file, made if it is not there; not a link, and not inherited."""
    return open_private(path, os.O_RDWR | os.O_CREAT)


def try_lock(handle: int, path: Path) -> bool:
    """Take the lock on ``handle``, unless a tree holds it, or the file at ``path`` is another one by now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return is_current(handle, path)


def is_current(handle: int, path: Path) -> bool:
    """The file at ``path`` is the one that ``handle`` is of: it was not removed since, nor made anew."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int | None]:
    """An existing lock file; None when there is none."""
    try:
        handle = open_private(path, os.O_RDWR)
    except (FileNotFoundError, NotPrivateError):
        yield None  # no lock of this user is there
        return
    try:
        yield handle
    finally:
        os.close(handle)


def lock_is_free(path: Path) -> bool:
    """No process tree of that rank is kept on this node."""
    with opened(path) as handle:
        if handle is None:
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def lock_is_clear(path: Path) -> bool:
    """No process tree of that rank is kept on this node, and the last one ended under its keeper."""
    with opened(path) as handle:
        return handle is None or (holder.is_clear(handle) and lock_is_free(path))


def remove_locks(node_dir: Path, job_id: str) -> None:
    """Remove the lock files of a job that has ended; one beside which something is left stays for ``clear_locks``."""
    for path in (node_dir / "ranks").glob(f"{job_id}.*{_SUFFIX}"):
        with contextlib.suppress(OSError), opened(path) as handle:
            if handle is not None and holder.is_clear(handle) and try_lock(handle, path):
                path.unlink()


def read_holder(path: Path) -> holder.Holder | None:
    """What the lock file says of the tree; None when it ended under its keeper, or nothing is known of one."""
    with opened(path) as handle:
        return None if handle is None else holder.read(handle)
