"""Lists the files of a working directory that a submission archives, and counts and names what ignore files exclude.

Git's rules apply to ``.gitignore`` and ``.orchignore``: a deeper directory's file takes precedence over a higher one's, a later line over an earlier one, and
nothing below an excluded directory is included again. ``.orchignore`` counts as lines after those of the ``.gitignore``
beside it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from orchestrator.core.events import LeftOut
from orchestrator.spec.globs import GlobError, Globs
from orchestrator.spec.plain_files import read_plain
from orchestrator.units import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


MAX_FILES: Final = 50_000
MAX_DEPTH: Final = 64
MAX_COUNTED: Final = 2000
NAMED_LEFT_OUT: Final = 3


class WorkdirError(Exception):
    """The working directory cannot be archived; the message gives the obstacle and what to do."""


@dataclass(slots=True)
class LeftOutCount:
    """Counts what ignore files exclude, up to ``most`` files: a directory of data may hold millions; and links that lead out."""

    most: int = MAX_COUNTED
    files: int = 0
    size_bytes: int = 0
    by: set[str] = field(default_factory=set)
    largest: list[tuple[int, str]] = field(default_factory=list)
    more: bool = False
    links_out: int = 0
    links: list[str] = field(default_factory=list)
    seen: int = 0

    def add_link(self, found: Found, root: Path) -> None:
        """Count a link if it leads out of ``root``."""
        target = link_target(found, root)
        if os.path.isabs(target):
            self.links_out += 1
            if len(self.links) < NAMED_LEFT_OUT:
                self.links.append(f"{found.relative} -> {target}")

    def add(self, entry: os.DirEntry[str], relative: str, by: str) -> None:
        """Count a file, or the content of a directory."""
        stack = [(entry, relative)]
        while stack:
            entry, relative = stack.pop()
            self.seen += 1
            if self.files >= self.most or self.seen > MAX_FILES:
                self.more = True
                return
            try:
                if entry.is_dir(follow_symlinks=False):
                    with os.scandir(entry.path) as inside:
                        stack += [(e, f"{relative}/{e.name}") for e in islice(inside, self.most + 1)]
                    continue
                length = entry.stat(follow_symlinks=False).st_size
            except OSError:
                continue  # it would be excluded anyway
            self.files += 1
            self.size_bytes += length
            self.by.add(by)
            self.largest = sorted([*self.largest, (-length, relative)])[:NAMED_LEFT_OUT]

    def counts(self) -> LeftOut | None:
        """Return the counts; None where nothing was excluded and no link leads out."""
        if not self.files and not self.links_out:
            return None
        return LeftOut(
            files=self.files,
            size_bytes=self.size_bytes,
            by=tuple(sorted(self.by)),
            largest=tuple(name for _, name in self.largest),
            more=self.more,
            links_out=self.links_out,
            links=tuple(self.links),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A file, link or empty directory to archive; ``relative`` is its path below the working directory."""

    relative: str
    path: Path
    status: os.stat_result


def walk(root: Path, left_out: LeftOutCount) -> Iterator[Found]:
    """Yield all in ``root`` that a submission archives; add to ``left_out`` what is excluded. Raises WorkdirError."""
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
                if relative.count("/") >= MAX_DEPTH:
                    raise WorkdirError(
                        f"{root} holds directories more than {MAX_DEPTH} levels deep, below"
                        f" {relative.split('/', maxsplit=1)[0]}; list it in .gitignore"
                    )
                stack.append((Path(entry.path), f"{relative}/", rules))
                continue
            try:
                found = Found(relative, Path(entry.path), entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue  # removed since the directory was listed
            if entry.is_symlink():
                left_out.add_link(found, root)
            yield found
        if empty and prefix:
            yield Found(prefix.rstrip("/"), directory, directory.stat())


def link_target(found: Found, root: Path) -> str:
    """Return the target of a link's copy: relative if it leads to a place below ``root``, else absolute.

    An absolute link to a place below ``root`` would lead the job out of its copy, and a relative link out of ``root`` to
    another place. A loop, or a link to nothing, stays what it is.
    """
    target, inside = os.readlink(found.path), os.path.realpath(root)
    folder = os.path.realpath(found.path.parent)
    leads_to = os.path.realpath(found.path)  # does not raise for a loop
    if leads_to != inside and not leads_to.startswith(f"{inside}/"):
        return target if os.path.isabs(target) else leads_to
    if not os.path.isabs(target):
        return target
    place = inside if os.path.realpath(target) == inside else _beside(target)
    return os.path.relpath(place if place.startswith(inside) else leads_to, folder)


def _beside(path: str) -> str:
    """Return the path with all links above its last part resolved: a link to a link stays one."""
    above, name = os.path.split(os.path.normpath(path))
    return os.path.join(os.path.realpath(above), name)


def refuse_too_large(directory: Path, found: Sequence[Found], max_bytes: int) -> int:
    """Return the size of all files in bytes. Raises WorkdirError where it exceeds ``max_bytes``."""
    total = sum(f.status.st_size for f in found if stat.S_ISREG(f.status.st_mode))
    if total > max_bytes:
        largest = sorted(found, key=lambda f: -f.status.st_size)[:3]
        names = ", ".join(f"{f.relative} ({size(f.status.st_size)})" for f in largest)
        raise WorkdirError(
            f"working_dir {directory} holds {size(total)}, the limit is {size(max_bytes)}; list data in"
            f" .gitignore and read it from its own place. Largest: {names}"
        )
    return total
