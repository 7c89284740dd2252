"""Parts of sentences: another program's text, a rank, sizes, spans and moments."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from orchestrator.spec.units import format_duration

CUT: Final = 200
"""Maximum characters of another program's text in a sentence; the fact has all of it."""


def quoted(text: str) -> str:
    """Return another program's text in brackets, to append to a sentence; empty for nothing."""
    return f" ({text[:CUT]})" if text else ""


def of_rank(rank: int | None, text: str) -> str:
    """Return ``text`` about a rank; ``text`` alone about a fact without a rank."""
    return text if rank is None else f"rank {rank}: {text}"


def span(seconds: float) -> str:
    """Return seconds as users write durations."""
    return format_duration(timedelta(seconds=round(seconds)))


def moment(at: float) -> str:
    """Return seconds since the epoch as a date and a time."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
