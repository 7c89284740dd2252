"""The events that a daemon receives from a rank: numbered, each once, of the requested attempt."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.core.diagnosis.observation import TerminalSeen
from orchestrator.core.events import Exit
from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.ranks.rank_actor import RankActor
from orchestrator.runtime.ranks.rank_events import PollCursor, StaleAttemptError
from tests.support.records import replace


class World:
    """A rank's actor with progress, checkpoints and samples that a test sets."""

    def __init__(self) -> None:
        self.actor = actor = RankActor(job_id="digits-abc234", rank=0, node_dir="/none", attempt=1, leased=False)
        self.log, self.fence = actor._log, actor._fence
        self.fence.attempt = 1
        self.marks = 0
        self.page = True
        output = SimpleNamespace(lost=None)
        self.progress: Any = SimpleNamespace(newest=None, number=0, seconds=3600.0, output=output, look=self._look)
        self.checkpoints: Any = SimpleNamespace(newest=None, number=0, look=lambda _masker: None)
        self.processes: Any = SimpleNamespace(newest=None, number=0, look=lambda _pid, _training: None)
        actor._progress, actor._checkpoints, actor._evidence = self.progress, self.checkpoints, self  # type: ignore[assignment]

    def _look(self, _masker: Masker, *, final: bool) -> bool:
        return self.page

    def mark(self) -> None:
        self.marks += 1

    async def ask(self, cursor: PollCursor | None = None, attempt: int = 1) -> Any:
        return await self.actor.poll(attempt, cursor or PollCursor(), 0.0)


def test_events_are_told_once_and_can_be_asked_for_again() -> None:
    async def run() -> None:
        world = World()
        world.log.add(kind="started", at=1.0, pid=7)
        first = await world.ask()
        assert [event.kind for event in first.events] == ["started"]
        assert (await world.ask(first.cursor)).events == ()
        world.log.add(kind="exited", at=2.0, exit=Exit(rank=0, at=2.0, exit_code=0, signal=None))
        assert [event.number for event in (await world.ask(first.cursor)).events] == [2]
        assert [event.number for event in (await world.ask()).events] == [1, 2], "a restarted daemon asks again"

    asyncio.run(run())


def test_a_poll_returns_when_something_happens() -> None:
    async def run() -> None:
        world = World()
        waiting = asyncio.create_task(world.actor.poll(1, PollCursor(), 3600.0))
        await asyncio.sleep(0)
        world.log.add(kind="started", at=1.0, pid=7)
        async with asyncio.timeout(300):
            assert (await waiting).cursor.event == 1

    asyncio.run(run())


def test_an_older_attempt_is_refused_and_of_a_newer_one_nothing_is_said() -> None:
    async def run() -> None:
        world = World()
        world.log.add(kind="gone", at=1.0)
        assert (await world.ask(attempt=2)).events == ()
        world.fence.attempt = 2
        world.log.begin()
        with pytest.raises(StaleAttemptError):
            await world.ask(attempt=1)
        assert (await world.ask(attempt=2)).events == ()

    asyncio.run(run())


def test_progress_and_checkpoints_are_told_when_their_numbers_grow() -> None:
    async def run() -> None:
        world = World()
        world.progress.newest, world.progress.number = "step 3", 1
        world.checkpoints.newest, world.checkpoints.number = "saved", 4
        reply = await world.ask()
        assert (reply.progress, reply.persisted) == ("step 3", "saved")
        again = await world.ask(reply.cursor)
        assert (again.progress, again.persisted) == (None, None)

    asyncio.run(run())


def test_what_the_kernel_says_counts_from_the_last_look_before_an_end() -> None:
    async def run() -> None:
        world = World()
        await world.ask()
        assert world.marks == 1
        world.log.add(kind="exited", at=1.0, exit=Exit(rank=0, at=1.0, exit_code=None, signal=9))
        await world.ask()
        assert world.marks == 1
        world.page = False
        await world.ask(PollCursor(event=1))
        assert world.marks == 1

    asyncio.run(run())


def test_the_log_knows_the_state_of_its_process() -> None:
    async def run() -> None:
        log = World().log
        assert (log.pid, log.running, log.exited) == (0, False, False)
        log.add(kind="started", at=1.0, pid=7)
        assert (log.pid, log.running, log.exited) == (7, True, False)
        log.masker = Masker(("hush",))
        end = Exit(rank=0, at=2.0, exit_code=1, signal=None, error_message="the token is hush")
        log.add(kind="exited", at=2.0, exit=end)
        assert (log.running, log.exited) == (False, True)
        (told,) = log.after(1)
        assert told.exit == replace(end, error_message="the token is ***")

    asyncio.run(run())


def test_a_terminal_s_state_is_told_when_it_changes() -> None:
    async def run() -> None:
        world = World()
        terminal = SimpleNamespace(number=0, newest=TerminalSeen(), look=lambda _cpu, _now: None)
        world.actor._sessions.terminal = terminal  # type: ignore[assignment]
        first = await world.ask()
        assert first.terminal is None
        terminal.number, terminal.newest = 1, TerminalSeen(attached=1)
        told = await world.ask(first.cursor)
        assert told.terminal == TerminalSeen(attached=1)
        assert (await world.ask(told.cursor)).terminal is None

    asyncio.run(run())
