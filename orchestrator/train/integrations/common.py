"""What the integrations share: checkpoints named after their step, and the check that a library trains with all ranks of the job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import trees
from orchestrator.train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.train.script.training_context import Context

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
    trees.remove(target)
    draft.rename(target)


def keep_newest(folder: Path, pattern: str, keep: int) -> None:
    """Remove all but the ``keep`` newest, and drafts that were never finished."""
    for _, path in steps_in(folder, pattern)[keep:]:
        trees.remove(path)
    for path in folder.glob(f"{DRAFT}*"):
        trees.remove(path)


def require_all_ranks(ctx: Context, processes: int, *, library: str, remedy: str) -> None:
    """Raise ConfigError unless the library counts as many processes as the job has ranks: otherwise each rank would train by itself.

    ``remedy``: what to write.
    """
    if processes == ctx.world_size:
        return
    have = "process" if processes == 1 else "processes"
    raise ConfigError(
        f"{library} trains with {processes} {have}, the job has {ctx.world_size} ranks: they would not train together"
        f" and would overwrite each other's files; {remedy}"
    )
