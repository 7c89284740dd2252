"""What ``.gitignore`` and ``.orchignore`` leave out of the copy of a working directory, and which of the two does.

Git's rules: a deeper directory's file wins over a higher one's, a later line over an earlier one, and nothing below a directory
that is left out comes back. ``.orchignore`` counts as lines after those of the ``.gitignore`` beside it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

import pathspec

if TYPE_CHECKING:
    from collections.abc import Sequence

IGNORE_FILES: Final = (".gitignore", ".orchignore")
ALWAYS_IGNORED: Final = frozenset({".git", "__pycache__", ".venv", ".orch"})


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """The rules of one directory. ``prefix`` is its path below the working directory, empty or with a slash at its end."""

    prefix: str
    spec: pathspec.PathSpec
    git_lines: int

    def judge(self, relative: str, *, is_dir: bool) -> str | None:
        """The file that leaves ``relative`` out; empty where one keeps it in, None where these rules do not speak of it."""
        name = f"{relative}/" if is_dir else relative
        result = self.spec.check_file(name[len(self.prefix) :])
        if result.include is None or result.index is None:
            return None
        return IGNORE_FILES[result.index >= self.git_lines] if result.include else ""


def rules_of(directory: Path, prefix: str) -> tuple[IgnoreRules, ...]:
    """The rules that a directory adds: none or one."""
    lines: list[list[str]] = []
    for name in IGNORE_FILES:
        path = directory / name
        text = path.read_text(errors="replace") if path.is_file() else ""
        lines.append([line for line in text.splitlines() if line])
    if not any(lines):
        return ()
    spec = pathspec.GitIgnoreSpec.from_lines([*lines[0], *lines[1]])
    return (IgnoreRules(prefix, spec, len(lines[0])),)


def ignored_by(rules: Sequence[IgnoreRules], relative: str, *, is_dir: bool) -> str:
    """The ignore file that leaves ``relative`` out; empty where none does. ``rules``: those of all directories above it."""
    for one in reversed(rules):
        judged = one.judge(relative, is_dir=is_dir)
        if judged is not None:
            return judged
    return ""


def left_out_by(root: Path, path: str) -> str:
    """The ignore file that leaves ``path`` (absolute, or relative to ``root``) out of ``root``'s copy; empty where none does."""
    relative = os.path.relpath(root / path, root)
    parts = PurePosixPath(relative).parts
    if not parts or parts[0] in ("..", "."):
        return ""
    rules: tuple[IgnoreRules, ...] = ()
    for index, part in enumerate(parts):
        prefix = "".join(f"{above}/" for above in parts[:index])
        rules = (*rules, *rules_of(root / prefix, prefix))
        found = ignored_by(rules, f"{prefix}{part}", is_dir=index < len(parts) - 1)
        if found:
            return found
    return ""
