"""When a keeper kills its rank."""

from __future__ import annotations

import math
import time

STOP_SECONDS = 10.0
"""How long a rank that was asked to stop may outlive its owner: less than the lease of a lost node's ranks."""
ASKED_SECONDS = 0.2
"""How long after its owner's end a keeper may still get the SIGTERM that ended its owner: the sender may have to wait for a CPU."""


class Deadline:
    """The time at which a rank is killed, and the ``cause`` that its exit record then gives; at first it is never killed.

    ``provisional``: at that time the keeper first looks whether the rank has been granted more.
    """

    def __init__(self) -> None:
        self._at = math.inf  # by the monotonic clock
        self.cause = "stop_deadline"
        self.provisional = False

    def seconds(self) -> float:
        """How long until then; infinite where there is none."""
        return self._at - time.monotonic()

    def at_most(self, seconds: float) -> None:
        """Bring it forward to ``seconds`` from now, if it is later."""
        self._at = min(self._at, time.monotonic() + seconds)

    def move(self, seconds: float, cause: str, *, provisional: bool = False) -> None:
        """Set it anew, to ``seconds`` from now."""
        self._at, self.cause, self.provisional = time.monotonic() + seconds, cause, provisional

    def clear(self) -> None:
        """Remove it."""
        self._at = math.inf
