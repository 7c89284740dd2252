"""Common moments for periodic work, so that one wake-up of the event loop serves all that is due."""

from __future__ import annotations

import math


def until_beat(seconds: float, now: float) -> float:
    """Return the time from ``now`` (of the loop's monotonic clock) to the next multiple of ``seconds``; more than half of it.

    Periods of half a second, one and two seconds thus meet. A beat that is near is left out, or late work would repeat at once.
    """
    left = (math.floor(now / seconds) + 1) * seconds - now
    return left if left > seconds / 2 else left + seconds
