"""Figures of a job's checkpoint writes: how long they take and usually took, and how long saves wait for storage. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from orchestrator.core import thresholds as d

if TYPE_CHECKING:
    from orchestrator.core.diagnosis.observation import JobSeen, StorageSeen

MOST_WRITES: Final = 16
LEAST_WRITES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStorage:
    """One rank: seconds of its newest write, or of the one in progress (``busy``) if that is longer, and of a usual one if known."""

    rank: int
    seconds: float
    busy: bool
    usual_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFigures:
    """``needed_bytes`` is the sum of the ranks' newest writes, ``free_bytes`` the smallest free space of a rank's storage.

    ``waiting`` is the share of the newest time in which saves waited for storage.
    """

    ranks: tuple[RankStorage, ...] = ()
    needed_bytes: int = 0
    free_bytes: int | None = None
    waiting: float = 0.0


NO_STORAGE: Final = StorageFigures()


class StorageWindow:
    """Writes of one attempt."""

    def __init__(self) -> None:
        self._writes: dict[int, deque[float]] = {}
        self._counted: dict[int, int] = {}
        self._waited: deque[tuple[float, float]] = deque()

    def add(self, clock: float, seen: JobSeen) -> StorageFigures:
        """Add an observation; return the figures with it."""
        if not seen.running:
            return NO_STORAGE
        ranks = tuple(self._rank(one) for one in seen.storage)
        free = [one.free_bytes for one in seen.storage if one.free_bytes is not None]
        return StorageFigures(
            ranks=ranks,
            needed_bytes=sum(one.written_bytes for one in seen.storage),
            free_bytes=min(free, default=None),
            waiting=self._waiting(clock, seen.saves.waited_seconds),
        )

    def _rank(self, seen: StorageSeen) -> RankStorage:
        writes = self._writes.setdefault(seen.rank, deque(maxlen=MOST_WRITES))
        if seen.writes > self._counted.get(seen.rank, 0) and not seen.failures:
            self._counted[seen.rank] = seen.writes
            writes.append(seen.seconds)
        earlier = list(writes)[:-1] if seen.busy_seconds < seen.seconds else list(writes)
        return RankStorage(
            rank=seen.rank,
            seconds=max(seen.busy_seconds, seen.seconds),
            busy=seen.busy_seconds >= max(seen.seconds, d.LEAST_WRITE_SECONDS),
            usual_seconds=median(earlier) if len(earlier) >= LEAST_WRITES else None,
        )

    def _waiting(self, clock: float, waited: float) -> float:
        self._waited.append((clock, waited))
        while len(self._waited) > 1 and self._waited[1][0] <= clock - d.WAITING_SECONDS:
            self._waited.popleft()
        (since, before), seconds = self._waited[0], clock - self._waited[0][0]
        return max(0.0, waited - before) / seconds if seconds >= d.WAITING_SECONDS / 2.0 and since < clock else 0.0
