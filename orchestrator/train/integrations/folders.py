"""Finds, publishes and removes checkpoints of other libraries, which are directories or files named after their step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import trees

if TYPE_CHECKING:
    from collections.abc import Callable

DRAFT = ".draft-"
"""Prefix of a checkpoint's name until the checkpoint is complete."""


def steps_in(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """Return the step and path of each entry that matches ``pattern`` (group 1 is the step), newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(pattern, path.name)
        if match is not None:
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def newest(folder: Path, pattern: str, is_whole: Callable[[Path], bool] = Path.exists) -> Path | None:
    """Return the newest complete checkpoint; None where there is none."""
    return next((path for _, path in steps_in(folder, pattern) if is_whole(path)), None)


def publish(draft: Path, target: Path) -> None:
    """Rename a complete draft to its final name, replacing an older checkpoint of the same step."""
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
    trees.remove(path)
