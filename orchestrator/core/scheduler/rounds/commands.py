"""Result of a decision: events, effects, when to ask again, and why jobs wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core.scheduler.live import Reasons

if TYPE_CHECKING:
    from orchestrator.core import events as ev
    from orchestrator.core.lifecycle.effects import Effect


@dataclass(slots=True, kw_only=True)
class Commands:
    """Events to write, effects that the records require, when to ask again, and why jobs wait."""

    events: list[ev.Event] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    wake_at: float | None = None
    waiting: Reasons = field(default_factory=Reasons)

    def ask_again(self, at: float | None) -> None:
        """Ask again no later than ``at``."""
        if at is not None and (self.wake_at is None or at < self.wake_at):
            self.wake_at = at
