"""Secrets in text: one object that replaces them, used wherever text of a rank leaves the processes beside it.

A secret of several lines is replaced line by line, as it is printed. Standard library only: keepers use it in the
user's interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MASK = "***"

SHORTEST_LINE = 4
"""A shorter line of a secret of several lines (a brace of a JSON document) says nothing, and would be found everywhere."""


class Masker:
    """Replaces the secrets in text and bytes by `***`."""

    def __init__(self, secrets: Iterable[str]) -> None:
        parts: set[str] = set()
        for secret in secrets:
            parts.add(secret)
            lines = [line.strip() for line in secret.splitlines()]
            if len(lines) > 1 or lines != [secret]:
                parts.update(line for line in lines if len(line) >= SHORTEST_LINE)
        parts.discard("")
        # The longest first: one secret may be the beginning of another.
        self.parts = tuple(sorted(parts, key=lambda part: (-len(part), part)))
        self._encoded = tuple(part.encode(errors="surrogateescape") for part in self.parts)

    def __bool__(self) -> bool:
        return bool(self.parts)

    def text(self, text: str) -> str:
        """The text without secrets."""
        for part in self.parts:
            text = text.replace(part, MASK)
        return text

    def data(self, data: bytes) -> bytes:
        """The bytes without secrets."""
        for part in self._encoded:
            data = data.replace(part, MASK.encode())
        return data

    def beginning(self, data: bytes) -> int:
        """How many bytes at the end of `data` may be the beginning of a secret that goes on in what follows."""
        longest = 0
        for part in self._encoded:
            for length in range(min(len(part) - 1, len(data)), longest, -1):
                if data.endswith(part[:length]):
                    longest = length
                    break
        return longest
