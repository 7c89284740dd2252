"""Pending actions by time. The only clock of the in-memory runtime: it advances only on request."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True, eq=False)
class Entry:
    """One pending action, which ``cancel`` voids."""

    action: Callable[[], None] | None

    def cancel(self) -> None:
        """Void the action."""
        self.action = None


class Agenda:
    """Runs actions in the order of their times; actions of the same time in the order in which they were added."""

    def __init__(self, now: float) -> None:
        self.now = now
        self._heap: list[tuple[float, int, Entry]] = []
        self._entered = 0

    def at(self, when: float, action: Callable[[], None]) -> Entry:
        """Add an action for wall time ``when``, or for now if that has passed."""
        entry = Entry(action)
        self._entered += 1
        heapq.heappush(self._heap, (max(when, self.now), self._entered, entry))
        return entry

    def after(self, seconds: float, action: Callable[[], None]) -> Entry:
        """Add an action that is due in ``seconds``."""
        return self.at(self.now + seconds, action)

    @property
    def next_at(self) -> float | None:
        """Return when the next action is due; None when there is none."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def step(self, until: float) -> bool:
        """Run the next action that is due by ``until``, at its time. False when there is none."""
        when = self.next_at
        if when is None or when > until:
            return False
        _, _, entry = heapq.heappop(self._heap)
        self.now = max(self.now, when)
        action, entry.action = entry.action, None
        if action is not None:
            action()
        return True

    def run_until(self, until: float) -> int:
        """Run everything that is due by ``until``, which becomes the current time; return the number of actions."""
        count = 0
        while self.step(until):
            count += 1
        self.now = max(self.now, until)
        return count
