"""The terminal of a rank: attached clients, a breakpoint at which no client is attached, an interactive rank that is idle."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import termios
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core.events import Exit
from orchestrator.runtime.forkserver import launch
from orchestrator.runtime.ranks.session_messages import (
    READ_BYTES,
    AttachRequest,
    EndReason,
    SessionEnd,
    SessionRefusedError,
    Terminal,
)
from orchestrator.runtime.ranks.sessions import attach
from orchestrator.runtime.ranks.terminal import KEPT_BYTES, RankTerminal
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator


class World:
    """A terminal with a clock."""

    def __init__(self, idle_seconds: float | None = None) -> None:
        self.now = 0.0
        self.notes: list[str] = []
        self.terminal = RankTerminal(
            1, idle_seconds=idle_seconds, note=self.notes.append, unattended_seconds=60.0, clock=lambda: self.now
        )

    def look(self, at: float, cpu: float | None = None) -> None:
        self.now = at
        self.terminal.look(cpu, 1000.0 + at)


def asking(*, secrets: bool = True, rows: int = 31) -> AttachRequest:
    return AttachRequest(terminal=Terminal(rows=rows, columns=99, kind="xterm"), secrets=secrets)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await test()

    asyncio.run(bounded())


def test_clients_get_what_there_was_and_what_comes_and_leave_the_rank_running() -> None:
    async def body() -> None:
        world = World(idle_seconds=60.0)
        terminal = world.terminal
        terminal.show(b"earlier\r\n")
        first, second = (attach(terminal, asking(), has_secrets=False) for _ in range(2))
        terminal.show(b"later")
        assert (await first.read(1.0)).stdout == b"earlier\r\nlater"
        assert (await second.read(1.0)).stdout == b"earlier\r\nlater"
        assert termios.tcgetwinsize(terminal.theirs) == (31, 99)
        second.resize(50, 120)
        assert termios.tcgetwinsize(terminal.theirs) == (50, 120)
        world.look(1.0)
        assert terminal.newest.attached == 2
        await first.close(EndReason.ABANDONED)
        assert (await first.read(1.0)).end == SessionEnd(reason=EndReason.ABANDONED)
        second.finish(Exit(rank=1, at=1.0, exit_code=7, signal=None))
        assert (await second.read(1.0)).end == SessionEnd(reason=EndReason.EXITED, exit_code=7)
        terminal.close()

    run(body)


def test_a_client_that_reads_nothing_bounds_what_is_kept_and_is_told() -> None:
    async def body() -> None:
        world = World(idle_seconds=60.0)
        slow = attach(world.terminal, asking(), has_secrets=False)
        for _ in range(40):
            world.terminal.show(b"x" * 20_000)
        found = (await slow.read(1.0)).stdout
        assert len(found) <= READ_BYTES
        assert found.startswith(b"\r\n[orch] output was left out")
        late = attach(world.terminal, asking(), has_secrets=False)
        assert len((await late.read(1.0)).stdout) == KEPT_BYTES
        world.terminal.close()

    run(body)


def test_secrets_are_for_the_job_s_user_and_no_terminal_is_said() -> None:
    async def body() -> None:
        world = World()
        with pytest.raises(SessionRefusedError):
            attach(world.terminal, asking(secrets=False), has_secrets=True)
        with pytest.raises(SessionRefusedError):
            attach(None, asking(), has_secrets=False)
        assert not world.terminal._viewers
        world.terminal.close()

    run(body)


def test_an_interactive_rank_is_idle_without_keys_output_and_work() -> None:
    async def body() -> None:
        world = World(idle_seconds=60.0)
        terminal = world.terminal
        for at, cpu in ((0.0, 1.0), (30.0, 1.1), (59.0, 1.2)):
            world.look(at, cpu)
        assert not terminal.newest.idle
        world.look(60.0, 1.2)
        assert terminal.newest.idle
        terminal.show(b"$ ")
        world.look(100.0, 1.3)
        assert not terminal.newest.idle, "it printed"
        await terminal.write(b"x")
        world.look(119.0, 1.4)
        world.look(125.0, 2.5)
        world.look(180.0, 2.6)
        assert not terminal.newest.idle, "its processes worked at 125"
        world.look(186.0, 2.7)
        assert terminal.newest.idle
        terminal.close()

    run(body)


def test_a_breakpoint_is_seen_and_its_input_ends_when_nobody_comes() -> None:
    async def body() -> None:
        world = World()
        terminal = world.terminal
        prompt = os.open(terminal.path, os.O_RDWR | os.O_NOCTTY)
        world.look(1.0)
        assert terminal.newest.stopped_at is None
        fcntl.flock(prompt, fcntl.LOCK_EX)
        world.look(5.0)
        assert terminal.newest.stopped_at == 1005.0
        client = attach(terminal, asking(), has_secrets=False)
        world.look(500.0)
        assert world.notes == [], "a client is attached"
        await client.close(EndReason.ABANDONED)
        world.look(559.0)
        assert world.notes == []
        world.look(560.0)
        assert len(world.notes) == 1
        assert os.read(prompt, 100) == b"", "the end of the debugger's input"
        os.close(prompt)
        world.look(562.0)
        assert terminal.newest.stopped_at is None
        terminal.close()

    run(body)


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Yield a function that connects `breakpoint()` to a terminal, as in a rank that has it."""
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)

    def connected(path: str) -> None:
        monkeypatch.setenv("ORCH_TERMINAL", path)
        launch.connect_debugger()

    yield connected
    launch._debugger.cache_clear()


def test_a_breakpoint_reads_from_the_terminal_and_holds_its_lock_there(connect: Callable[[str], None]) -> None:
    async def body() -> None:
        world = World()
        connect(world.terminal.path)
        client = attach(world.terminal, asking(), has_secrets=False)
        stopped = asyncio.create_task(asyncio.to_thread(_stops))
        said = b""
        for typed in (b"p locked()\n", b"c\n"):
            while not said.endswith(b"(Pdb) "):
                said += (await client.read(1.0)).stdout
            await client.write(typed)
            while typed.strip() not in said:
                said += (await client.read(1.0)).stdout
        assert await stopped == "went on"
        while b"True" not in said:
            said += (await client.read(1.0)).stdout
        world.look(1.0)
        assert world.terminal.newest.stopped_at is None
        world.terminal.close()

    run(body)


def _stops() -> str:
    def locked() -> bool:
        descriptor = os.open(os.environ["ORCH_TERMINAL"], os.O_RDWR | os.O_NOCTTY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    value: Any = locked  # noqa: F841 - the debugger calls it
    breakpoint()  # noqa: T100 - it is what is tested
    return "went on"


@pytest.mark.parametrize("chosen", ["", "0", "math.sqrt"])
def test_a_breakpoint_is_python_s_own_where_there_is_no_terminal_or_another_debugger_is_chosen(
    connect: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    connect("/nonexistent/terminal" if chosen else "")
    monkeypatch.setenv("PYTHONBREAKPOINT", chosen or "math.sqrt")
    assert breakpoint(4.0) == (None if chosen == "0" else 2.0)  # type: ignore[func-returns-value]  # noqa: T100
