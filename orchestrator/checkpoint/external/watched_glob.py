"""The glob under which a script's own checkpoints are searched, and its matches."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator import trees

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """A glob (relative to ``directory`` unless absolute), the registry's path, the number of checkpoints to keep."""

    pattern: str
    directory: str
    registry: str
    keep: int | None = 3


class WatchedGlob:
    """The glob of ``checkpoint.watch``. Finds no links, and nothing outside of its own directory."""

    def __init__(self, settings: WatchSettings) -> None:
        self._pattern = settings.pattern
        self._directory = settings.directory

    @property
    def has_fixed_name(self) -> bool:
        """Whether each save overwrites the previous one, as far as the glob shows."""
        return not glob.has_magic(self._pattern)

    def matches(self) -> list[str]:
        """Return the present matches; of nested ones only the outermost."""
        base = os.path.realpath(self._fixed())
        found: list[str] = []
        for match in sorted(_glob(self._pattern, self._directory)):
            path = os.path.normpath(os.path.join(self._directory, match))  # keeps links as they are
            inside = os.path.realpath(path) == os.path.join(base, os.path.relpath(path, self._fixed()))
            if inside and path != self._fixed() and not any(path.startswith(f"{outer}/") for outer in found):
                found.append(path)
        return found

    def _fixed(self) -> str:
        """Return the directory that must contain the matches: the job's, or an absolute glob's part without wildcards."""
        if not self._pattern.startswith("/"):
            return os.path.normpath(self._directory)
        before = re.split(r"[*?\[]", self._pattern)[0]
        return os.path.normpath(before.rpartition("/")[0] or "/")


def _glob(pattern: str, directory: str) -> set[str]:
    """Return what ``glob.glob(pattern, recursive=True)`` returns, which calls itself for each level that ``**`` enters."""
    parts = pattern.split("/")
    if "**" not in parts:
        return set(glob.glob(pattern, root_dir=directory))
    first = parts.index("**")
    before, after = "/".join(parts[:first]), "/".join(parts[first + 1 :])
    tops = {"/" if pattern.startswith("/") else ""} if not before else set(glob.glob(f"{before}/", root_dir=directory))
    found: set[str] = set()
    for top in tops:
        for folder in _directories(os.path.join(directory, top)):
            below = os.path.join(top, folder)
            found |= {os.path.join(below, match) for match in _glob(after or "*", os.path.join(directory, below))}
            if below and not after:
                found.add(below)
    return found


def _directories(top: str) -> Iterator[str]:
    """Yield a directory (as the empty path) and those below it that are not hidden."""
    yield ""
    for found in trees.walk(top, trees.Problems()):
        if found.is_directory and not any(name.startswith(".") for name in found.path.split("/")):
            yield found.path
