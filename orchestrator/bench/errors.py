"""Errors of a benchmark: of the request, or of a rank."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot be run as requested; the message gives the reason, ``hint`` what to change."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RankError(BenchError):
    """A rank failed at a command or ended; the ranks must be restarted. The message contains the rank's own error."""
