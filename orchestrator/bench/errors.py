"""What can go wrong with a benchmark: the request, or a rank."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot be run as asked; the message says why, ``hint`` what to change."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RankError(BenchError):
    """A rank failed at a command or ended; the ranks have to be started anew. The message has its own words."""
