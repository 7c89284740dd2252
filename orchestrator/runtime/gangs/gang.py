"""State of a job's gang in the daemon's memory; all of it can be found again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.runtime.gangs.reports import LeftOut
from orchestrator.runtime.node_clock import NodeClock

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from orchestrator.core.diagnosis.observation import ProcessSeen, StorageSeen, TerminalSeen
    from orchestrator.runtime.ranks.actor import RankGreeting
    from orchestrator.runtime.ranks.rank_events import PollCursor
    from orchestrator.train.script.progress import ProgressSnapshot
    from orchestrator.train.script.progress_reading import PageReader


@dataclass(slots=True)
class Gang:
    """The gang's actors by rank, their first answers, and the relay's record of the attempt ``watching``."""

    number: int
    actors: list[Any]
    greetings: list[RankGreeting] = field(default_factory=list)
    watching: int = 0
    watchers: list[asyncio.Task[None]] = field(default_factory=list)
    started: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    unreached: set[int] = field(default_factory=set)
    newest: dict[int, ProgressSnapshot] = field(default_factory=dict)
    processes: dict[int, ProcessSeen] = field(default_factory=dict)
    storage: dict[int, StorageSeen] = field(default_factory=dict)
    terminals: dict[int, TerminalSeen] = field(default_factory=dict)
    cursors: dict[int, PollCursor] = field(default_factory=dict)
    pages: dict[int, PageReader] = field(default_factory=dict)
    """The progress pages that the daemon reads itself: those of running ranks on its own machine."""
    failing: dict[int, tuple[str, str]] = field(default_factory=dict)
    """The present failure of each rank's saves, over all attempts."""
    clocks: defaultdict[int, NodeClock] = field(default_factory=lambda: defaultdict(NodeClock))
    left_out: LeftOut = field(default_factory=LeftOut)

    def begin(self, attempt: int) -> None:
        """Start with an empty record of ``attempt``."""
        self.watching = attempt
        self.started, self.gone, self.newest, self.unreached, self.cursors = {}, set(), {}, set(), {}
        self.processes, self.storage, self.terminals = {}, {}, {}
        self.close_pages(list(self.pages))

    def unwatch(self) -> None:
        """Stop recording reports of the attempt."""
        for task in self.watchers:
            task.cancel()
        self.close_pages(list(self.pages))

    def close_pages(self, ranks: Iterable[int]) -> None:
        """Close the pages of these ranks; a rank without one is left out."""
        for rank in ranks:
            if (page := self.pages.pop(rank, None)) is not None:
                page.close()
