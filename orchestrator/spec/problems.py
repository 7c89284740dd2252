"""Errors in a text from outside, each with its place, its message and what to write instead.

Defines the package's exceptions and their data. Must stay light (standard library only, nothing slow at import):
the command line imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Path = tuple[str | int, ...]
"""Keys and list positions from the top of the file, e.g. `("retry", "log_policies", 0, "pattern")`."""

_PRINTED = 100
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One error. Lines and columns count from 1; 0 means that the value did not come from a text."""

    line: int
    column: int
    path: str
    message: str
    hint: str = ""
    source: str = ""

    def __str__(self) -> str:
        place = self.source if self.source.isprintable() else ascii(self.source)[1:-1]
        place = place or "job"
        if self.line:
            place = f"{place}:{self.line}:{self.column}"
        subject = f"{self.path}: " if self.path else ""
        advice = f" ({self.hint})" if self.hint else ""
        return f"{place}: {subject}{self.message}{advice}"


class SpecError(ValueError):
    """A job file was refused. `problems` holds everything wrong with it; fix those lines and submit again."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems[:_PRINTED]]
        if len(self.problems) > _PRINTED:
            lines.append(f"... and {len(self.problems) - _PRINTED} more")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One broken rule between values: the value concerned, and the others that it used."""

    path: Path
    message: str
    hint: str
    others: tuple[Path, ...] = ()


class BadValueError(ValueError):
    """An error of one value, raised by code that does not have the value's place in the file."""

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(message, hint)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


def dotted(path: Path) -> str:
    """Write a path the way messages show it: `retry.log_policies[0].pattern`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{shown(step)}" if text else shown(step)
    return text


def shown(text: str) -> str:
    """Make untrusted text fit for a message: one line, no control characters, at most 60 characters."""
    if len(text) > _SHOWN:
        text = text[: _SHOWN - 3] + "..."
    return text if text.isprintable() else ascii(text)[1:-1]


def quoted(text: str) -> str:
    """Return the result of `shown` in quotation marks."""
    return f'"{shown(text)}"'


def nearest(word: str, words: Sequence[str]) -> str | None:
    """Return the word most similar to the given one, or None when none is similar."""
    from difflib import get_close_matches

    plain = {candidate.lower(): candidate for candidate in words}
    found = get_close_matches(word[:_SHOWN].lower(), plain, n=1, cutoff=0.7)
    return plain[found[0]] if found else None
