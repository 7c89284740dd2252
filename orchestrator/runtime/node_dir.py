"""Where a node keeps what is its own: sockets, locks, progress pages. Never on a shared filesystem."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the point is that it is memory


def node_directory(namespace: str, node_id: str) -> Path:
    """The node's directory; short, because a Unix socket's path is."""
    return Path(tempfile.gettempdir()) / f"orch-{os.getuid()}" / namespace.removeprefix("orch-") / node_id[:12]


def fork_socket(node_dir: Path, python: str) -> Path:
    """The fork server's socket for an interpreter; ``python`` and ``python3`` of one environment are the same one."""
    program = Path(python)
    identity = f"{program.parent}|{os.path.realpath(program)}"
    return node_dir / "fork" / f"{hashlib.sha256(identity.encode()).hexdigest()[:12]}.sock"


def page_directory(namespace: str) -> Path:
    """Where progress pages live: shared memory where there is some."""
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return base / f"orch-{os.getuid()}-{namespace.removeprefix('orch-')}"


def snapshot_directory(pages: Path, job_id: str) -> Path:
    """Where a job's ranks leave snapshots, beside its progress pages; outlives its actors."""
    return pages / f"{job_id}.snapshots"


def clear_pages(node_dir: Path, live: Collection[str], young_seconds: float = 60.0) -> None:
    """Remove the pages and snapshots that jobs which are not ``live`` have left in a node's shared memory.

    What is younger may belong to a job that the asker did not know of when it asked.
    """
    now = time.time()
    for path in page_directory(node_dir.parent.name).glob("*"):
        job_id = path.name.split(".", 1)[0]
        with contextlib.suppress(OSError):
            if job_id in live or now - path.stat().st_ctime < young_seconds:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def make_private(path: Path) -> Path:
    """Create a directory, and its parents below the temporary directory, for this user alone.

    Raises PermissionError when another user owns it: somebody else got there first.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user; remove it, or set TMPDIR to a directory of your own")
    return path
