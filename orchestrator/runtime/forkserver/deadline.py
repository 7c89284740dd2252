"""The deadline at which a keeper kills its rank."""

from __future__ import annotations

import math
import time

STOP_SECONDS = 10.0
"""Time that a rank that was asked to stop may outlive its owner: less than the lease of a lost node's ranks."""
ASKED_SECONDS = 0.2
"""Time after its owner's end in which a keeper may still get the SIGTERM that ended it: the sender may have to wait for a CPU."""


class Deadline:
    """Time at which a rank is killed, and the ``cause`` that its exit record then contains; at first there is none.

    ``provisional``: at that time the keeper first checks whether the rank has been asked to stop and may run longer.
    """

    def __init__(self) -> None:
        self._at = math.inf  # by the monotonic clock
        self.cause = "stop_deadline"
        self.provisional = False

    def seconds(self) -> float:
        """Return the seconds until the deadline; infinite where there is none."""
        return self._at - time.monotonic()

    def at_most(self, seconds: float) -> None:
        """Move the deadline to ``seconds`` from now, if it is later."""
        self._at = min(self._at, time.monotonic() + seconds)

    def move(self, seconds: float, cause: str, *, provisional: bool = False) -> None:
        """Set the deadline to ``seconds`` from now."""
        self._at, self.cause, self.provisional = time.monotonic() + seconds, cause, provisional

    def clear(self) -> None:
        """Remove the deadline."""
        self._at = math.inf
