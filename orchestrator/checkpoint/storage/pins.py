"""Keeps a checkpoint of another job for a job that starts from it, even if the other job removes it.

The other job continues to save and to remove checkpoints, and the new job may wait in the queue for days. A committed
checkpoint's files never change, so a hard link to each is as good as a copy and takes no space.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from orchestrator.checkpoint.format import layout

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
            shutil.copytree(source, target, symlinks=True, copy_function=os.link if is_ours else shutil.copy2)
        else:
            shutil.copy2(source, target, follow_symlinks=False)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(target, ignore_errors=True)
        if not is_ours or not _cannot_link(error):
            raise
        with contextlib.suppress(OSError):
            target.parent.rmdir()
        return path
    return str(target)


def _cannot_link(error: OSError) -> bool:
    """Whether linking failed because of the file systems; copytree collects errors of files as texts."""
    if not isinstance(error, shutil.Error):
        return error.errno in _NO_LINK
    return all(any(os.strerror(number) in str(each[2]) for number in _NO_LINK) for each in error.args[0])
