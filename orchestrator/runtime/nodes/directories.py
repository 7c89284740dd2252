"""Directories of a node's own state: sockets, locks, progress pages. Never on a shared filesystem."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator import trees
from orchestrator.private_files import check_private, enter_private, make_private

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

LOCAL: Final = "local"
"""The directory of an embedded head's node, whatever id Ray gives it."""

ROUND_SECONDS: Final = 20.0
"""How long one call removes files that are no longer needed: the next call, or the next daemon, continues."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it must be memory


def user_directory() -> Path:
    """Return this user's directory, which contains those of all daemons and nodes on this machine."""
    return Path(tempfile.gettempdir()) / f"orch-{os.getuid()}"


def node_directory(namespace: str, node_id: str) -> Path:
    """Return the node's directory; short, because the path of a Unix socket is limited."""
    return user_directory() / namespace.removeprefix("orch-") / node_id[:12]


def make_node_directory(namespace: str, node_id: str) -> Path:
    """Create the node's directory, for this user only like the two above it. Raises NotPrivateError, OSError."""
    directory = node_directory(namespace, node_id)
    for level in (directory.parents[1], directory.parent, directory):
        make_private(level)
    return directory


def check_places(namespace: str, *, shared_memory: Path = SHARED_MEMORY) -> None:
    """Raise NotPrivateError where another user owns a directory of this machine's own node. Creates nothing."""
    check_private(node_directory(namespace, LOCAL))
    check_private(page_directory(namespace, shared_memory=shared_memory))


def fork_socket(node_dir: Path, python: str) -> Path:
    """Return the fork server's socket for an interpreter; ``python`` and ``python3`` of one environment share it."""
    return fork_socket_in(node_dir, fork_socket_name(python))


def fork_socket_in(node_dir: Path, name: str) -> Path:
    """Return the path of the socket ``name`` from ``fork_socket_name``, which is slow: call that once for a gang."""
    return node_dir / "fork" / name


def fork_socket_name(python: str) -> str:
    """Return the name of an interpreter's socket, the same on every node."""
    program = Path(python)
    identity = f"{program.parent}|{os.path.realpath(program)}"
    return f"{hashlib.sha256(identity.encode()).hexdigest()[:12]}.sock"


def page_directory(namespace: str, *, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Return the directory of progress pages: shared memory where available."""
    base = shared_memory if shared_memory.is_dir() else Path(tempfile.gettempdir())
    return base / f"orch-{os.getuid()}-{namespace.removeprefix('orch-')}"


def snapshot_directory(pages: Path, job_id: str) -> Path:
    """Return where a job's ranks leave snapshots, beside its progress pages; outlives its actors."""
    return pages / f"{job_id}.snapshots"


def clear_pages(
    node_dir: Path, live: Collection[str], young_seconds: float = 60.0, *, shared_memory: Path = SHARED_MEMORY
) -> None:
    """Remove the pages and snapshots in a node's shared memory of jobs that are not ``live``.

    A file younger than ``young_seconds`` is kept: it may belong to a job that started after the caller read ``live``.
    Nothing is removed where the directory of pages is another user's, or a link.
    """
    now, until = time.time(), time.monotonic() + ROUND_SECONDS
    with _entries(page_directory(node_dir.parent.name, shared_memory=shared_memory)) as (folder, entries):
        for entry in entries:
            job_id = entry.name.split(".", 1)[0]
            with contextlib.suppress(OSError):
                if job_id in live or now - entry.stat(follow_symlinks=False).st_ctime < young_seconds:
                    continue
                trees.remove(entry.name, dir_fd=folder, until=until)


def remove_of_jobs(directory: Path, job_ids: Collection[str]) -> dict[str, str]:
    """Remove the files of these jobs from a node's directory; return by job why a file could not be removed.

    Nothing is removed where the directory is another user's, or a link.
    """
    failed: dict[str, str] = {}
    with _entries(directory) as (folder, entries):
        for entry in entries:
            job_id = entry.name.split(".", 1)[0]
            if job_id not in job_ids:
                continue
            if left := trees.remove(entry.name, dir_fd=folder).left:
                failed[job_id] = f"{entry.name}: {left}"
    return failed


def page_name(job_id: str, rank: int) -> str:
    """Return the file name of a rank's progress page."""
    return f"{job_id}.{rank}.page"


@contextlib.contextmanager
def _entries(directory: Path) -> Iterator[tuple[int, list[os.DirEntry[str]]]]:
    """Return a descriptor and the entries of a directory that is private to this user; nothing for any other."""
    try:
        folder = enter_private(directory)
    except OSError:
        yield -1, []
        return
    try:
        with os.scandir(folder) as found:
            yield folder, list(found)
    finally:
        os.close(folder)
