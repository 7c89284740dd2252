"""Aligns periodic work to common moments, so that one wake-up of the event loop serves all work that is due."""

from __future__ import annotations

import math


def until_beat(seconds: float, now: float) -> float:
    """Return the time from ``now`` (loop's monotonic clock) to the next multiple of ``seconds``, or the one after it.

    Periods of half a second, one and two seconds thus coincide. A multiple at most half a period away is skipped: late
    work would otherwise repeat at once.
    """
    left = (math.floor(now / seconds) + 1) * seconds - now
    return left if left > seconds / 2 else left + seconds
