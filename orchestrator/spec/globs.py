"""Patterns of .gitignore, .orchignore and ``outputs``, compiled and matched in time bounded by their length and the path's.

A backtracking regular expression takes seconds for ``*a*a*a*a*ab`` and a long name (that of the package pathspec takes
more than a minute), and blocks the whole process meanwhile. Here one ``*`` never backtracks into another: between two wildcards the leftmost match is as good as any
later one, for the characters of a segment (``fnmatch.translate`` makes atomic groups) and for the segments between two
``**``. A pattern of p segments examines at most p times as many segments as the path has.

Standard library only; reads no file.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_PATTERN_CHARACTERS: Final = 4096
MAX_PATTERNS: Final = 10_000
MAX_WIDE_SETS: Final = 200
"""Sets such as [ä-ü] in lines with characters beyond ASCII, of all patterns: compiling one takes some milliseconds."""
_SPECIAL: Final = frozenset("*?[\\")


class GlobError(ValueError):
    """A pattern is too long, or there are too many patterns; shorten the list."""


class Meter(Protocol):
    """Called for each compared segment: tests bound the work by it, not by a clock."""

    def __call__(self) -> None:
        """Count one compared segment."""
        ...


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a pattern between two slashes. ``pattern`` is None for plain text."""

    text: str
    pattern: re.Pattern[str] | None

    def matches(self, name: str) -> bool:
        return name == self.text if self.pattern is None else self.pattern.match(name) is not None


@dataclass(frozen=True, slots=True)
class Glob:
    """One pattern. ``chunks`` are the runs of segments between ``**``; the first begins the path, unless ``floats``."""

    chunks: tuple[tuple[_Segment, ...], ...]
    floats: bool
    open_end: bool
    only_directories: bool
    negated: bool
    line: int = 0

    def matches(self, path: Sequence[str], *, is_dir: bool, meter: Meter | None = None) -> bool:
        """Whether the pattern matches the path of these segments, or a directory above it."""
        at = self._end(self.chunks, path, meter)
        if at is None:
            return False
        if self.open_end:  # "a/**" matches what is below a, not a itself
            at += 1
        return at < len(path) or (at == len(path) and (is_dir or not self.only_directories))

    def names(self, path: Sequence[str], *, is_dir: bool) -> bool:
        """Whether the pattern matches the path itself, regardless of the directories above it."""
        if self.only_directories and not is_dir:
            return False
        *others, last = self.chunks or ((),)
        at = self._end(others, path, None)
        if at is None:
            return False
        if self.open_end:
            found = _leftmost(last, path, at, anywhere=bool(others) or self.floats, meter=None)
            return found is not None and found + len(last) < len(path)
        start = len(path) - len(last)
        fits = start >= at and (start == at or bool(others) or self.floats)
        return fits and _all_match(last, path, start, None)

    def _end(self, chunks: Sequence[tuple[_Segment, ...]], path: Sequence[str], meter: Meter | None) -> int | None:
        """Return where the leftmost match of the chunks ends; None where there is none."""
        at = 0
        for number, chunk in enumerate(chunks):
            found = _leftmost(chunk, path, at, anywhere=number > 0 or self.floats, meter=meter)
            if found is None:
                return None
            at = found + len(chunk)
        return at


def _leftmost(
    chunk: Sequence[_Segment], path: Sequence[str], start: int, *, anywhere: bool, meter: Meter | None
) -> int | None:
    last = len(path) - len(chunk)
    for at in range(start, (last if anywhere else min(start, last)) + 1):
        if _all_match(chunk, path, at, meter):
            return at
    return None


def _all_match(chunk: Sequence[_Segment], path: Sequence[str], at: int, meter: Meter | None) -> bool:
    for offset, segment in enumerate(chunk):
        if meter is not None:
            meter()
        if not segment.matches(path[at + offset]):
            return False
    return True


class Globs:
    """Patterns in order: the last one that matches a path decides, and ``!`` negates it."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._globs: list[Glob] = []
        wide = 0
        for number, line in enumerate(lines):
            wide += 0 if line.isascii() else line.count("[")
            if wide > MAX_WIDE_SETS:
                raise GlobError(f"more than {MAX_WIDE_SETS} sets of characters in lines with characters beyond ASCII")
            glob = parse(line)
            if glob is not None:
                self._globs.append(replace(glob, line=number))
            if len(self._globs) > MAX_PATTERNS:
                raise GlobError(f"more than {MAX_PATTERNS} patterns")

    def __len__(self) -> int:
        return len(self._globs)

    def matches(self, path: str, *, is_dir: bool = False, meter: Meter | None = None) -> bool:
        """Whether ``path``, relative and with slashes, matches."""
        segments = path.split("/")
        return next(
            (not g.negated for g in reversed(self._globs) if g.matches(segments, is_dir=is_dir, meter=meter)), False
        )

    def last(self, path: str, *, is_dir: bool) -> Glob | None:
        """Return the last pattern that matches ``path`` itself, without the directories above it; None where there is none."""
        segments = path.split("/")
        return next((g for g in reversed(self._globs) if g.names(segments, is_dir=is_dir)), None)


def parse(line: str) -> Glob | None:
    """Return the pattern of a line of .gitignore; None for a comment, an empty line, and one that can never match.

    Raises GlobError for one that is too long.
    """
    text = _stripped(line)
    if not text or text.startswith("#"):
        return None
    if len(text) > MAX_PATTERN_CHARACTERS:
        raise GlobError(f"the pattern {text[:40]!r}… has {len(text)} characters, the most are {MAX_PATTERN_CHARACTERS}")
    negated = text.startswith("!")
    text = text.removeprefix("!")
    only_directories = text.endswith("/")
    text = text.removesuffix("/")
    anchored = "/" in text
    parts = text.removeprefix("/").split("/")
    if not all(parts):
        return None
    chunks: list[tuple[_Segment, ...]] = []
    run: list[_Segment] = []
    for part in parts:
        if part == "**":
            chunks.append(tuple(run))
            run = []
        else:
            run.append(_segment(part))
    open_end = parts[-1] == "**"
    chunks += [] if open_end else [tuple(run)]
    floats = not anchored or not chunks[0]
    return Glob(
        chunks=tuple(chunk for chunk in chunks if chunk),
        floats=floats,
        open_end=open_end,
        only_directories=only_directories,
        negated=negated,
    )


def _stripped(line: str) -> str:
    """Return the line without its line break and trailing blanks; a backslash keeps one blank."""
    text = line.rstrip("\r\n")
    bare = text.rstrip(" \t")
    backslashes = len(bare) - len(bare.rstrip("\\"))
    return text[: len(bare) + 1] if backslashes % 2 and len(bare) < len(text) else bare


def _segment(part: str) -> _Segment:
    if not _SPECIAL.intersection(part):
        return _Segment(part, None)
    return _Segment(part, re.compile(fnmatch.translate(_for_fnmatch(part))))


def _for_fnmatch(part: str) -> str:
    """Convert the segment for ``fnmatch``, which supports neither a backslash nor ``[^``."""
    out: list[str] = []
    at = 0
    while at < len(part):
        char = part[at]
        if char == "\\" and at + 1 < len(part):
            out.append(_literal(part[at + 1]))
            at += 2
        elif char == "[" and (end := _bracket_end(part, at)) is not None:
            inside = part[at + 1 : end]
            out.append("[" + ("!" + inside[1:] if inside.startswith("^") else inside) + "]")
            at = end + 1
        else:
            out.append(_literal(char) if char == "[" else char)
            at += 1
    return "".join(out)


def _literal(char: str) -> str:
    return f"[{char}]" if char in "*?[" else char


def _bracket_end(part: str, start: int) -> int | None:
    """Return where the set that begins at ``start`` ends; None where it never does: then the bracket is literal."""
    at = start + 1
    if part[at : at + 1] in ("!", "^"):
        at += 1
    end = part.find("]", at + 1)  # a first bracket belongs to the set
    return None if end < 0 else end
