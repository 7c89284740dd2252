"""A job is not late while a rank is at a breakpoint; an interactive job is cancelled when all its ranks are idle."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from orchestrator.core.diagnosis.observation import TerminalSeen
from orchestrator.core.events import StopRequested
from orchestrator.core.states import StopPurpose
from orchestrator.daemon.jobs.hangs import Attendance
from orchestrator.spec.model import InteractiveSpec
from tests.unit.core.builders import T0, after, make_spec, pending, started, up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core import events as ev


class World:
    """One job of two ranks, and the events that it receives."""

    def __init__(self, **spec: Any) -> None:
        job = pending(make_spec(**spec))
        self.job = after(job, started(job), up(job))
        self.terminals: dict[int, TerminalSeen] = {}
        self.events: list[ev.Event] = []
        self.tasks: list[Any] = []
        self.attendance = Attendance(
            jobs=lambda: [self.job],
            terminals=lambda _: self.terminals,
            command=self.command,
            spawn=self.tasks.append,
            now=lambda: T0 + 100,
        )

    async def command(self, make: Callable[[], Sequence[ev.Event]]) -> None:
        self.events += make()

    def attend(self) -> bool:
        found = self.attendance.attend(self.job)
        while self.tasks:
            asyncio.run(self.tasks.pop())
        return found


def test_an_idle_interactive_job_is_cancelled_once_all_its_ranks_are_idle() -> None:
    world = World(interactive=InteractiveSpec())
    assert world.attend(), "it is never late"
    world.terminals = {0: TerminalSeen(interactive=True, idle=True), 1: TerminalSeen(rank=1, interactive=True)}
    assert world.attend()
    assert world.events == []
    world.terminals[1] = TerminalSeen(rank=1, interactive=True, idle=True)
    assert world.attend()
    (event,) = world.events
    assert isinstance(event, StopRequested)
    assert event.purpose is StopPurpose.CANCEL
    assert event.by.sentence() == "its limit interactive.idle_limit"


def test_a_job_is_not_late_while_a_rank_is_at_a_breakpoint() -> None:
    world = World()
    assert not world.attend()
    world.terminals = {1: TerminalSeen(rank=1, stopped_at=5.0)}
    assert world.attend()
    world.terminals = {1: TerminalSeen(rank=1, idle=True)}
    assert not world.attend()
    assert world.events == []
