"""The lock of a job's rank on its node: the keeper of a live process tree holds it, so it shows whether the tree lives.

The file's content (forkserver/holder.py) names the tree. A free lock whose file is not empty means that the keeper was
killed: its tree may still live, and its memory may still be being freed. ``rank_remains`` ends what is left.
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
