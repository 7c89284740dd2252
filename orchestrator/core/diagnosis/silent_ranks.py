"""Finds stopped processes among the ranks that have reported nothing while others have.

The others may make steps without them and are not still, and many scripts report on one rank only, so a rank's silence is no evidence. A
process that the kernel shows as stopped, at one look after another, is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis.health import Standing, standing
from orchestrator.core.facts.hangs import Hang, Lateness, Sign, Stillness

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.diagnosis.health import RankLook
    from orchestrator.core.diagnosis.heartbeat import Heartbeat

LOOK_SECONDS: Final = 5.0
AGAIN_SECONDS: Final = 1.0
"""Time between two looks once a process is seen stopped: one that runs in between was not stopped all the time."""


@dataclass(slots=True)
class SilentRanks:
    """Silent ranks of one attempt. Times are monotonic seconds; ``due`` is the next look, ``hang`` the lasting stop."""

    due: float = 0.0
    hang: Hang | None = None
    _looks: Mapping[int, RankLook] = field(default_factory=dict)
    _since: dict[int, float] = field(default_factory=dict)

    def seen(self, looks: Mapping[int, RankLook], heartbeat: Heartbeat, attempt: int, now: float) -> bool:
        """Record a look at each of them; return whether ``hang`` is a new one."""
        before, self._looks = self._looks, looks
        pairs = {rank: (before.get(rank, look), look) for rank, look in sorted(looks.items())}
        stopped = [rank for rank, pair in pairs.items() if standing(*pair) is Standing.STOPPED]
        self._since = {rank: self._since.get(rank, now) for rank in stopped}
        self.due = now + (AGAIN_SECONDS if stopped else LOOK_SECONDS)
        told = self.hang.seen if self.hang is not None else None
        rank = next((rank for rank in stopped if now - self._since[rank] >= heartbeat.stopped_after), None)
        if rank is None:
            self.hang = None
            return False
        still, usual = now - self._since[rank], heartbeat.usual_seconds
        late = Lateness(still_seconds=still, usual_seconds=usual, by_steps=False)
        seen = Stillness(rank=rank, sign=Sign.STOPPED, pid=looks[rank].stopped_pid)
        self.hang = Hang(seen=seen, late=late, attempt=attempt)
        return seen != told
