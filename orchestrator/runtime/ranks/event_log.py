"""The events of a rank's current attempt: numbered, so that a restarted daemon can request those that it missed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.ranks.rank_events import RankEvent
from orchestrator.runtime.ranks.secrets import masked_event

if TYPE_CHECKING:
    from orchestrator.core.events import Exit
    from orchestrator.runtime.ranks.fence import AttemptFence

SENT_WITH_END_SECONDS: Final = 0.05


class EventLog:
    """Numbered events. ``masker`` removes secrets from them."""

    def __init__(self, fence: AttemptFence, *, sent_with_end_seconds: float = SENT_WITH_END_SECONDS) -> None:
        self._fence = fence
        self._sent_with_end_seconds = sent_with_end_seconds
        self._events: list[RankEvent] = []
        self._news = asyncio.Event()
        self.masker = Masker(())

    def begin(self) -> None:
        """Start an empty log for another attempt."""
        self._events = []

    def add(self, **fields: Any) -> None:
        """Add an event and wake the waiters."""
        event = masked_event(RankEvent(number=len(self._events) + 1, **fields), self.masker)
        self._events.append(event)
        if event.kind == "exited" and self._fence.ends_by_order:
            # An ordered end is reported together with the end of its tree, which nearly always follows at once.
            asyncio.get_running_loop().call_later(self._sent_with_end_seconds, self._news.set)
        else:
            self._news.set()

    def after(self, number: int) -> tuple[RankEvent, ...]:
        """Return the events after this number."""
        return tuple(event for event in self._events if event.number > number)

    async def wait(self, seconds: float) -> None:
        """Return at the next event, or after ``seconds``."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    @property
    def pid(self) -> int:
        """The rank's process id; 0 before it has started."""
        return next((event.pid for event in self._events if event.kind == "started"), 0)

    @property
    def exit(self) -> Exit | None:
        """The exit of the process; None before it was reported."""
        return next((event.exit for event in self._events if event.kind == "exited"), None)

    @property
    def exited(self) -> bool:
        """Whether the exit of the process was reported."""
        return any(event.kind == "exited" for event in self._events)

    @property
    def running(self) -> bool:
        """Whether the process has started and its end was not reported."""
        return bool(self._events) and not self.ended

    @property
    def ended(self) -> bool:
        """Whether an end was reported: of the process, or of an attempt that never started."""
        return any(event.kind != "started" for event in self._events)
