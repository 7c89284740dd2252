"""Pace of a persister: the pauses between its looks for snapshots, and the share of the time that it may write."""

from __future__ import annotations

from dataclasses import dataclass

LOOK_SECONDS = 0.25  # each look costs 0.1 to 0.3 ms of a core
UNUSED_LOOK_SECONDS = 1.0  # while the script has saved nothing, after some twenty seconds
SOON_SECONDS = 0.002  # the first look after a wanted snapshot was written; then twice as long each time
BUSY_SHARE = 0.05  # of the time, at most, is spent writing: a slow storage stretches the interval
RETRY_SECONDS = 2.0  # after a failed write
PATIENCE_SECONDS = 30.0  # until a version that some rank has not stored is abandoned for a newer one
_SLOWER_FACTOR = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Share of the time that writes may take, and the seconds to wait after failures and for missing parts."""

    busy_share: float = BUSY_SHARE
    retry_seconds: float = RETRY_SECONDS
    patience_seconds: float = PATIENCE_SECONDS


def next_pause(pause: float, *, busy: bool, used: bool) -> float:
    """Return the seconds until the next look, after a pause of ``pause``.

    ``busy``: the last look wrote a wanted snapshot. ``used``: the script has saved something.
    """
    if busy:
        return SOON_SECONDS
    if used:
        return min(2 * pause, LOOK_SECONDS)
    return min(max(pause, LOOK_SECONDS) * _SLOWER_FACTOR, UNUSED_LOOK_SECONDS)
