"""Keeps writers of older attempts out of a checkpoint directory.

The newest attempt writes its number into fence.json before it loads; every save reads it, and the commit reads it again
under the lock. Even where a share has no locks, an old attempt's checkpoint does no harm: newer attempts sort first.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from orchestrator.checkpoint.errors import StaleAttemptError
from orchestrator.checkpoint.format import layout

if TYPE_CHECKING:
    from orchestrator.checkpoint.storage.storage import Storage

_MOST = 2**63


class Fence:
    """The fence of one directory, held for ``attempt``; None adopts the newest attempt seen.

    ``lease``: this process supervises the ranks of that newer attempt. It may still commit what the ended ranks of
    ``attempt`` left in memory.
    """

    def __init__(self, storage: Storage, attempt: int | None, lease: int = 0) -> None:
        self._storage = storage
        self.attempt = max(self.newest_seen(), 1) if attempt is None else attempt
        self.lease = max(lease, self.attempt)
        self._held = False

    def hold(self, *, announce: bool) -> bool:
        """Check the fence, and on the first call ``announce`` this attempt; return whether this was that call."""
        self.check(thorough=not self._held)
        first, self._held = not self._held, True
        if first and announce and self._value() < self.attempt:
            with self._storage.lock():
                if self._value() < self.attempt:
                    self._storage.replace(layout.FENCE, json.dumps({"attempt": self.attempt}).encode())
        return first and announce

    def check(self, *, thorough: bool = False) -> None:
        """Raise StaleAttemptError when a newer attempt took over; ``thorough`` also reads the directory's names."""
        newest = self.newest_seen() if thorough else self._value()
        if newest > self.lease:
            raise StaleAttemptError(
                f"attempt {newest} has taken over {self._storage.location()}; this process belongs to attempt"
                f" {self.attempt} and must end"
            )

    def newest_seen(self) -> int:
        """Return the newest attempt that announced itself or left a checkpoint; 0 when there was none."""
        names = self._storage.names()
        seen = [found.attempt for name in names if (found := layout.parse_name(name) or layout.parse_broken(name))]
        return max(self._value(), *seen, 0)

    def _value(self) -> int:
        """Return the attempt of the fence; 0 where it is missing or damaged: newer attempts still sort first."""
        try:
            attempt = json.loads(bytes(self._storage.read(layout.FENCE)))["attempt"]
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return 0
        return attempt if type(attempt) is int and 0 <= attempt < _MOST else 0
