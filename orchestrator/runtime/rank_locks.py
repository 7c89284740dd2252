"""The lock of a job's rank on its node: held by the keeper of a live process tree, so the kernel knows who is gone."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from orchestrator.private_files import NotPrivateError, open_private

if TYPE_CHECKING:
    from pathlib import Path


def rank_lock_path(node_dir: Path, job_id: str, rank: int) -> Path:
    """The lock file of a job's rank on a node."""
    return node_dir / "ranks" / f"{job_id}.{rank}.lock"


def lock_is_free(path: Path) -> bool:
    """No process tree of that rank is alive on this node."""
    try:
        handle = open_private(path, os.O_RDWR)
    except (FileNotFoundError, NotPrivateError):
        return True  # no lock of this user is there
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True
