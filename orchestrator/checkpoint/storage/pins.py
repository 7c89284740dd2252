"""Keeps a checkpoint of another job for a job that starts from it, even if the other job removes it.

The other job continues to save and to remove checkpoints, and the new job may wait in the queue for days. A committed
checkpoint's files never change, so a hard link to each is as good as a copy and takes no space.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import trees
from orchestrator.checkpoint.format import layout
from orchestrator.durable_files import sync_tree

if TYPE_CHECKING:
    import os

_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES})


def pin(path: str, folder: str | os.PathLike[str]) -> str:
    """Keep the checkpoint at ``path`` under ``folder``; return its new path.

    A checkpoint behind a URL, or on a file system that cannot be linked from ``folder``, stays where it is: its own job
    must keep it. Files that a job's script wrote itself may be rewritten in place, and are copied. Raises OSError when
    it is gone, or the copy fails.
    """
    if "://" in path:
        return path
    source, target = Path(path), Path(folder) / Path(path).name
    is_ours = source.is_dir() and layout.parse_name(source.name) is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if source.is_dir():
            problems = trees.Problems()
            trees.copy(source, target, problems, link=is_ours)
            problems.refuse(source)
        else:
            shutil.copy2(source, target, follow_symlinks=False)
        sync_tree(target)
    except OSError as error:
        trees.remove(target)
        if not is_ours or error.errno not in _NO_LINK:
            raise
        with contextlib.suppress(OSError):
            target.parent.rmdir()
        return path
    return str(target)
