"""Translates times of a node whose clock differs from the daemon's. Pure.

Times of ranks are read from their node's clock, and compared with the daemon's and with those of other nodes: which rank failed
first, when an attempt began. Clocks that a time service keeps together are left alone.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, TypeVar

from msgspec import Struct, structs

AGREE_SECONDS: Final = 2.0
"""A smaller difference counts as none: a reply may take that long on a busy machine."""
REPLIES: Final = 8
LATEST_SECONDS: Final = 60.0
"""Longer than any reply may take."""
_NAMES: Final = ("_at", "_since")

R = TypeVar("R", bound=Struct)


class NodeClock:
    """Measures how far a node's clock is behind the daemon's, by the fastest of a rank's last replies."""

    def __init__(self) -> None:
        self._differences: deque[float] = deque(maxlen=REPLIES)
        self.behind = 0.0
        """Seconds, 0 where the two agree."""

    def heard(self, sent_at: float, received_at: float) -> float:
        """Record a reply sent at ``sent_at`` by the node's clock (0: unknown); return how far that is behind."""
        if not sent_at:
            return self.behind
        difference = received_at - sent_at
        if self._differences and difference - min(self._differences) > LATEST_SECONDS:
            self._differences.clear()  # no reply takes so long: one of the clocks was set
        self._differences.append(difference)
        least = min(self._differences)
        self.behind = 0.0 if abs(least) < AGREE_SECONDS else least
        return self.behind


def moved(record: R, seconds: float) -> R:
    """Return a node's validated record with its wall times, also in nested records, moved by ``seconds``."""
    if not seconds:
        return record
    changes: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, Struct):
            changes[name] = moved(value, seconds)
        elif (name == "at" or name.endswith(_NAMES)) and value is not None:
            changes[name] = max(0.0, value + seconds)
    return structs.replace(record, **changes)
