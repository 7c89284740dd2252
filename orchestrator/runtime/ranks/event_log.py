"""The events of a rank's current attempt: numbered, so that a restarted daemon asks again for those that it missed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.ranks.rank_events import RankEvent
from orchestrator.runtime.ranks.secrets import masked_event

if TYPE_CHECKING:
    from orchestrator.runtime.ranks.fence import AttemptFence

TOLD_WITH_END_SECONDS: Final = 0.05


class EventLog:
    """``masker`` takes the secrets out of what is told."""

    def __init__(self, fence: AttemptFence, *, told_with_end_seconds: float = TOLD_WITH_END_SECONDS) -> None:
        self._fence = fence
        self._told_with_end_seconds = told_with_end_seconds
        self._events: list[RankEvent] = []
        self._news = asyncio.Event()
        self.masker = Masker(())

    def begin(self) -> None:
        """Another attempt: nothing of it has happened."""
        self._events = []

    def add(self, **fields: Any) -> None:
        """Something has happened; those that wait are woken."""
        event = masked_event(RankEvent(number=len(self._events) + 1, **fields), self.masker)
        self._events.append(event)
        if event.kind == "exited" and self._fence.ends_by_order:
            # Ordered, so no surprise: told with the end of its tree, which nearly always follows at once.
            asyncio.get_running_loop().call_later(self._told_with_end_seconds, self._news.set)
        else:
            self._news.set()

    def after(self, number: int) -> tuple[RankEvent, ...]:
        """What happened after the event with this number."""
        return tuple(event for event in self._events if event.number > number)

    async def wait(self, seconds: float) -> None:
        """Return when something happens, or after ``seconds``."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    @property
    def pid(self) -> int:
        """The rank's process; 0 before it has started."""
        return next((event.pid for event in self._events if event.kind == "started"), 0)

    @property
    def exited(self) -> bool:
        """The exit of the process was told."""
        return any(event.kind == "exited" for event in self._events)

    @property
    def running(self) -> bool:
        """The process has started, and its end was not told."""
        return bool(self._events) and not self.ended

    @property
    def ended(self) -> bool:
        """An end was told: of the process, or of an attempt that never started."""
        return any(event.kind != "started" for event in self._events)
