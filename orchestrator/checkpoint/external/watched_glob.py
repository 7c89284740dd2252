"""The glob under which a script's own checkpoints are searched, and its matches."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass


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
        for match in sorted(glob.glob(self._pattern, root_dir=self._directory, recursive=True)):
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
