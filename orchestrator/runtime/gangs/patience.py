"""Timeouts of calls to a gang's actors. Must not wait itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

POLL_SECONDS: Final = 30.0
ORDER_SECONDS: Final = 20.0
RETRY_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Durations: how long a poll is held, how long a live actor may take to answer, and the pause after a failure."""

    poll_seconds: float = POLL_SECONDS
    order_seconds: float = ORDER_SECONDS
    retry_seconds: float = RETRY_SECONDS
