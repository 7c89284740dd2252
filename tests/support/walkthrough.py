"""Draws the death of rank 3 as a Mermaid sequence diagram of a real run: ``python -m tests.support.walkthrough``.

The loop, the store and the runtime in memory are the production ones; this module only records the calls between them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import structlog

from orchestrator.core.events import RankExited
from orchestrator.core.job.record import hold_of
from orchestrator.core.states import JobState
from orchestrator.daemon.loop import Loop
from orchestrator.runtime.memory.cluster import MemoryCluster
from orchestrator.runtime.memory.faults import RankDies
from orchestrator.runtime.memory.gangs import MemoryGangs
from orchestrator.store.store import Store
from tests.support.stores import new_store
from tests.unit.core.builders import ID, T0, make_spec, node, submission

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core.events import Event
    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.advance import Effect
    from orchestrator.core.lifecycle.fold import Change

RANKS = 4
DIES = 3
PATIENCE = 1000.0  # seconds of the simulated clock
HEAD = """\
sequenceDiagram
    participant G as runtime, ranks
    participant L as daemon/loop.py
    participant F as core/lifecycle/fold.py
    participant D as core/scheduler/scheduler.py
    participant E as core/lifecycle/advance.py
    participant S as store"""


class Recorded:
    """The lines of the diagram, while recording."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.on = False
        self._posted: dict[int, Event] = {}  # by id; an event that is kept has an id of its own
        self._ordered: Effect | None = None

    def line(self, text: str) -> None:
        """Add a line while recording."""
        if self.on:
            self.lines.append(f"    {text}")

    def posted(self, events: Sequence[Event]) -> None:
        """Record events that the runtime posts to the loop."""
        self._posted |= {id(event): event for event in events}
        self.line(f"G->>L: {_event_names(events)}")

    def written(self, changes: Sequence[Change]) -> None:
        """Record one round of the loop: the events that it folded, decided, and wrote in one transaction."""
        for change in changes:
            if id(change.event) not in self._posted:
                self.line("L->>D: the live jobs")
                self.line(f"D-->>L: {_event_names([change.event])}")
            self.line(f"L->>F: {_event_names([change.event])}")
            self.line(f"F-->>L: {_phase(change.after)}")
        self.line(f"L->>S: {_event_names([change.event for change in changes])}, and the record (one transaction)")

    def ordered(self, job: Job, effect: Effect | None) -> None:
        """Record an effect that the loop applies, unless it is the same as before."""
        if effect is not None and effect != self._ordered:
            self.line(f"L->>E: {_phase(job)}, {hold_of(job.phase)}")
            self.line(f"E-->>L: {type(effect).__name__}")
            self.line(f"L->>G: {type(effect).__name__}, attempt {job.attempt_number}, gang {effect.gang}")
        self._ordered = effect


def _phase(job: Job) -> str:
    name, state = type(job.phase).__name__, job.state.value
    return state if name.upper() == state else f"{state} ({name})"


def _event_names(events: Sequence[Event]) -> str:
    kinds = Counter(type(event).__name__ for event in events)
    ranks = [event.exit.rank for event in events if isinstance(event, RankExited)]
    return ", ".join(
        f"RankExited of rank {', '.join(map(str, ranks))}" if kind == RankExited.__name__ else kind for kind in kinds
    )


class _Store(Store):
    recorded: Recorded

    async def append(self, changes: Sequence[Change], **clock: Any) -> None:
        self.recorded.written(changes)
        await super().append(changes, **clock)


class _Gangs(MemoryGangs):
    def __init__(self, cluster: MemoryCluster, post: Callable[[Sequence[Event]], None], recorded: Recorded) -> None:
        super().__init__(cluster, post=post)
        self._recorded = recorded

    def apply(self, job: Job, effect: Effect | None) -> None:
        self._recorded.ordered(job, effect)
        super().apply(job, effect)


async def _run() -> Recorded:
    recorded = Recorded()
    cluster = MemoryCluster([node("a", gpus=RANKS)], now=T0, latency=0.001)
    store = new_store(_Store)
    store.recorded = recorded

    def post(events: Sequence[Event]) -> None:
        recorded.posted(events)
        loop.post(events)

    gangs = _Gangs(cluster, post, recorded)
    loop = Loop(
        store=store,
        runtime=lambda: gangs,
        on_change=lambda _: None,
        on_end=lambda _: None,
        log=structlog.get_logger(),
        clock=cluster.clock(),
    )

    async def until_up(attempt: int) -> None:
        while (job := loop.jobs[ID]).state is not JobState.RUNNING or job.attempt_number != attempt:
            if not cluster.step(T0 + PATIENCE):
                raise AssertionError(f"the job stays {job.state}: {job.reason}")
            await loop.step()

    loop.set_nodes(cluster.views())
    job, _ = await store.submit(submission(make_spec(workers=RANKS)))
    loop.add(job)
    await loop.step()
    await until_up(1)
    recorded.on = True
    recorded.line(f"Note over G: rank {DIES} of {RANKS} is killed")
    RankDies(job=ID, rank=DIES).inject(cluster)
    await until_up(2)
    return recorded


def diagram() -> str:
    """Return the diagram."""
    return "\n".join([HEAD, *asyncio.run(_run()).lines])


if __name__ == "__main__":
    print(diagram())
