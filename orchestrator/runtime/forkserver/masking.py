"""Masks secrets in the text of a rank before the text is stored or sent.

A secret of several lines is masked line by line, as it is printed. A secret is also found in the encodings of URLs, JSON
and base64, in which libraries quote their input. Standard library only: keepers use it in the user's interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MASK = "***"

SHORTEST_LINE = 4
"""A shorter line of a secret of several lines (a brace of a JSON document) is not a secret, and would match everywhere."""

LONGEST_ENCODED = 1024
"""Each search text costs time for every line of output: a longer secret is searched for in its plain form only."""


class Masker:
    """Replaces secrets in text and bytes by `***`."""

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
        """Return the text without secrets."""
        for part in self.parts:
            text = text.replace(part, MASK)
        return text

    def data(self, data: bytes) -> bytes:
        """Return the bytes without secrets."""
        for part in self._encoded:
            data = data.replace(part, MASK.encode())
        return data

    def beginning(self, data: bytes) -> int:
        """Return how many bytes at the end of `data` may be the beginning of a secret that continues in the next bytes."""
        longest = 0
        for part in self._encoded:
            for length in range(min(len(part) - 1, len(data)), longest, -1):
                if data.endswith(part[:length]):
                    longest = length
                    break
        return longest


def _encodings(secret: str) -> Iterator[str]:
    """Return the URL, JSON and base64 encodings of a secret of one line."""
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
