"""One line of a job's log, as the API sends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from orchestrator.api.errors import ProtocolMismatchError
from orchestrator.api.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine(View):
    """One line that a rank wrote. ``at`` never decreases within one attempt, rank and stream."""

    at: float
    attempt: int
    rank: int
    stream: str
    text: str

    # Written by hand: logs are long, and the generic conversion takes five times as long for a line.

    def to_json(self) -> dict[str, Any]:
        """Return the line as JSON-ready values."""
        return {"at": self.at, "attempt": self.attempt, "rank": self.rank, "stream": self.stream, "text": self.text}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Return the line that ``data`` describes. Raises ProtocolMismatchError if a key is missing."""
        try:
            return cls(
                at=data["at"], attempt=data["attempt"], rank=data["rank"], stream=data["stream"], text=data["text"]
            )
        except (KeyError, TypeError) as error:
            raise ProtocolMismatchError(f"the daemon's answer is not a LogLine: {error}") from error
