"""Checkpoints of other libraries as directories or files whose names end in a step: the newest whole one, and old ones removed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

DRAFT = ".draft-"
"""What a name begins with until what it names is whole."""


def steps_in(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """What is named by ``pattern``, whose group 1 is the step, the newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(pattern, path.name)
        if match is not None:
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def newest(folder: Path, pattern: str, is_whole: Callable[[Path], bool] = Path.exists) -> Path | None:
    """The newest one that is whole; None where there is none."""
    return next((path for _, path in steps_in(folder, pattern) if is_whole(path)), None)


def publish(draft: Path, target: Path) -> None:
    """Give a whole checkpoint its name; one of the same step, from before, is replaced."""
    remove(target)
    draft.rename(target)


def keep_newest(folder: Path, pattern: str, keep: int) -> None:
    """Remove all but the ``keep`` newest, and drafts that were never finished."""
    for _, path in steps_in(folder, pattern)[keep:]:
        remove(path)
    for path in folder.glob(f"{DRAFT}*"):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
