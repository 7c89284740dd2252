"""Lists the files of a working directory that a submission archives, and counts those that ignore files exclude."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.core.events import LeftOut
from orchestrator.runtime.nodes.ignore_rules import ALWAYS_IGNORED, IgnoreFileError, ignored_by, rules_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orchestrator.runtime.nodes.ignore_rules import IgnoreRules

MAX_FILES: Final = 50_000
MAX_COUNTED: Final = 2000
NAMED_LEFT_OUT: Final = 3


class WorkdirError(Exception):
    """The working directory cannot be archived; the message gives the obstacle and what to do."""


@dataclass(slots=True)
class LeftOutCount:
    """Counts what ignore files exclude, up to ``most`` files: a directory of data may hold millions."""

    most: int = MAX_COUNTED
    files: int = 0
    size_bytes: int = 0
    by: set[str] = field(default_factory=set)
    largest: list[tuple[int, str]] = field(default_factory=list)
    more: bool = False

    def add(self, entry: os.DirEntry[str], relative: str, by: str) -> None:
        """Count a file, or the content of a directory."""
        stack = [(entry, relative)]
        while stack:
            entry, relative = stack.pop()
            if self.files >= self.most:
                self.more = True
                return
            try:
                if entry.is_dir(follow_symlinks=False):
                    with os.scandir(entry.path) as inside:
                        stack += [(e, f"{relative}/{e.name}") for e in islice(inside, self.most + 1)]
                    continue
                size = entry.stat(follow_symlinks=False).st_size
            except OSError:
                continue  # it would be excluded anyway
            self.files += 1
            self.size_bytes += size
            self.by.add(by)
            self.largest = sorted([*self.largest, (-size, relative)])[:NAMED_LEFT_OUT]

    def counts(self) -> LeftOut | None:
        """Return the counts; None where nothing was excluded."""
        if not self.files:
            return None
        names = tuple(name for _, name in self.largest)
        return LeftOut(
            files=self.files, size_bytes=self.size_bytes, by=tuple(sorted(self.by)), largest=names, more=self.more
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A file, link or empty directory to archive; ``relative`` is its path below the working directory."""

    relative: str
    path: Path
    status: os.stat_result


def walk(root: Path, left_out: LeftOutCount) -> Iterator[Found]:
    """Yield all in ``root`` that a submission archives; add excluded files to ``left_out``. Raises WorkdirError."""
    count = 0
    stack: list[tuple[Path, str, tuple[IgnoreRules, ...]]] = [(root, "", ())]
    while stack:
        directory, prefix, rules = stack.pop()
        try:
            rules = (*rules, *rules_of(directory, prefix))
        except IgnoreFileError as error:
            raise WorkdirError(str(error)) from error
        try:
            entries = sorted(os.scandir(directory), key=lambda e: e.name)
        except OSError as error:
            raise WorkdirError(f"{directory}: {error.strerror}; make it readable or list it in .gitignore") from error
        empty = True
        for entry in entries:
            relative = f"{prefix}{entry.name}"
            is_dir = entry.is_dir(follow_symlinks=False)
            if entry.name in ALWAYS_IGNORED:
                continue
            if by := ignored_by(rules, relative, is_dir=is_dir):
                left_out.add(entry, relative, by)
                continue
            empty = False
            count += 1
            if count > MAX_FILES:
                raise WorkdirError(f"{root} holds more than {MAX_FILES} files; list what is not code in .gitignore")
            if is_dir:
                stack.append((Path(entry.path), f"{relative}/", rules))
                continue
            yield Found(relative, Path(entry.path), entry.stat(follow_symlinks=False))
        if empty and prefix:
            yield Found(prefix.rstrip("/"), directory, directory.stat())


def link_target(found: Found, root: Path) -> str:
    """Return the target of a link below ``root``. Raises WorkdirError for one that leads out of it."""
    target = str(found.path.readlink())
    resolved = Path(os.path.realpath(found.path))
    if os.path.isabs(target) or not resolved.is_relative_to(Path(os.path.realpath(root))):  # noqa: PTH117 - the link's own text
        raise WorkdirError(
            f"{found.path} links to {target}, outside of working_dir; put the file itself there, or list the link"
            " in .gitignore"
        )
    return target


def refuse_too_large(directory: Path, found: Sequence[Found], max_bytes: int) -> int:
    """Return the size of all files in bytes. Raises WorkdirError where it exceeds ``max_bytes``."""
    size = sum(f.status.st_size for f in found if stat.S_ISREG(f.status.st_mode))
    if size > max_bytes:
        largest = sorted(found, key=lambda f: -f.status.st_size)[:3]
        names = ", ".join(f"{f.relative} ({f.status.st_size / 1e6:.0f} MB)" for f in largest)
        raise WorkdirError(
            f"working_dir {directory} holds {size / 1e6:.0f} MB, the limit is {max_bytes / 1e6:.0f} MB; list data in"
            f" .gitignore and read it from its own place. Largest: {names}"
        )
    return size
