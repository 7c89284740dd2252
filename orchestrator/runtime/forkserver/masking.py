"""Secrets in text: one object that replaces them, used wherever text of a rank leaves the processes beside it.

A secret of several lines is replaced line by line, as it is printed. Libraries quote what they failed with: a secret is also
found as URLs, JSON and base64 have it. Standard library only: keepers use it in the user's interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MASK = "***"

SHORTEST_LINE = 4
"""A shorter line of a secret of several lines (a brace of a JSON document) says nothing, and would be found everywhere."""

LONGEST_ENCODED = 1024
"""Each text that is searched for costs time at every line of output: a longer secret is found as it is only."""


class Masker:
    """Replaces the secrets in text and bytes by `***`."""

    def __init__(self, secrets: Iterable[str]) -> None:
        parts: set[str] = set()
        for secret in secrets:
            parts.add(secret)
            lines = [line.strip() for line in secret.splitlines()]
            if len(lines) > 1 or lines != [secret]:
                parts.update(line for line in lines if len(line) >= SHORTEST_LINE)
            parts.update(part for part in _encodings(secret) if len(part) >= SHORTEST_LINE)
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


def _encodings(secret: str) -> Iterator[str]:
    """What URLs, JSON and base64 make of a secret of one line."""
    secret = secret.strip()
    if not 0 < len(secret) <= LONGEST_ENCODED or len(secret.splitlines()) > 1:
        return
    import base64
    import json
    from urllib.parse import quote, quote_plus

    raw = secret.encode(errors="surrogateescape")
    yield from (quote(raw), quote(raw, safe=""), quote_plus(raw), json.dumps(secret)[1:-1])
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(raw).decode().rstrip("=")
