"""Applies ``.gitignore`` and ``.orchignore`` to the copy of a working directory, and names the file that excludes a path.

Git's rules: a deeper directory's file takes precedence over a higher one's, a later line over an earlier one, and
nothing below an excluded directory is included again. ``.orchignore`` counts as lines after those of the ``.gitignore``
beside it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from orchestrator.spec.globs import GlobError, Globs
from orchestrator.spec.plain_files import read_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

IGNORE_FILES: Final = (".gitignore", ".orchignore")
MAX_IGNORE_BYTES: Final = 1024 * 1024
ALWAYS_IGNORED: Final = frozenset({".git", "__pycache__", ".venv", ".orch"})


class IgnoreFileError(Exception):
    """An ignore file is not a regular file, cannot be read, or is too long; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """The rules of one directory. ``prefix`` is its path below the working directory, empty or with a slash at its end."""

    prefix: str
    globs: Globs
    git_lines: int

    def judge(self, relative: str, *, is_dir: bool) -> str | None:
        """Return the file that excludes ``relative``; empty where one includes it, None where no rule matches."""
        found = self.globs.last(relative[len(self.prefix) :], is_dir=is_dir)
        if found is None:
            return None
        return "" if found.negated else IGNORE_FILES[found.line >= self.git_lines]


def rules_of(directory: Path, prefix: str) -> tuple[IgnoreRules, ...]:
    """Return the rules that a directory adds: none or one. Raises IgnoreFileError."""
    lines: list[list[str]] = []
    for name in IGNORE_FILES:
        path = directory / name
        try:
            text = read_plain(path, MAX_IGNORE_BYTES, follow=True).decode(errors="replace")
        except FileNotFoundError:
            text = ""
        except OSError as error:
            raise IgnoreFileError(f"{path}: {error.strerror}; shorten it, or make it a readable file") from error
        lines.append([line for line in text.splitlines() if line])
    if not any(lines):
        return ()
    try:
        globs = Globs([*lines[0], *lines[1]])
    except GlobError as error:
        raise IgnoreFileError(f"{directory}: in {' and '.join(IGNORE_FILES)}: {error}; shorten them") from error
    return (IgnoreRules(prefix, globs, len(lines[0])),)


def ignored_by(rules: Sequence[IgnoreRules], relative: str, *, is_dir: bool) -> str:
    """Return the ignore file that excludes ``relative``; empty if none does. ``rules``: those of all directories above it."""
    for one in reversed(rules):
        judged = one.judge(relative, is_dir=is_dir)
        if judged is not None:
            return judged
    return ""


def left_out_by(root: Path, path: str) -> str:
    """Return the ignore file that excludes ``path`` (absolute or relative) from the copy of ``root``; empty if none does."""
    relative = os.path.relpath(root / path, root)
    parts = PurePosixPath(relative).parts
    if not parts or parts[0] in ("..", "."):
        return ""
    rules: tuple[IgnoreRules, ...] = ()
    for index, part in enumerate(parts):
        prefix = "".join(f"{above}/" for above in parts[:index])
        try:
            rules = (*rules, *rules_of(root / prefix, prefix))
        except IgnoreFileError:  # such a directory cannot be submitted: the ignore file is newer than the copy
            return ""
        found = ignored_by(rules, f"{prefix}{part}", is_dir=index < len(parts) - 1)
        if found:
            return found
    return ""
