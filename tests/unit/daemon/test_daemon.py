"""The daemon's order of start and end, and background tasks that fail or do not end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.daemon.daemon import Background, Daemon
from orchestrator.daemon.stopping import StopRequest
from tests.support.stack import PATIENCE_SECONDS
from tests.unit.daemon.parts import LOG


class World:
    """A daemon with parts that record their calls; ``connect`` waits for ``connected``."""

    def __init__(self, *, holding: bool = False) -> None:
        self.did: list[str] = []
        self.connected, self.ready, self.held = asyncio.Event(), asyncio.Event(), holding
        self.recovered = asyncio.Event()
        self.connected.set()
        self.error: Exception | None = None
        self.stop = StopRequest()
        self.background = Background(self.stop.now, LOG)
        self.address = "ray:6379"
        self.daemon = Daemon(
            recovery=self,  # type: ignore[arg-type]
            runtime=self,  # type: ignore[arg-type]
            background=self.background,
            tasks={"loop": self.loop},
            stop=self.stop,
            shutdown=self,  # type: ignore[arg-type]
            ready=self.ready,
            settle=lambda: self.did.append("settle reports"),
            close=lambda: self.did.append("close"),
            log=LOG,
        )

    async def loop(self) -> None:
        self.did.append("loop")
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()

    async def run(self) -> None:
        self.did.append("recover")
        self.recovered.set()

    async def connect(self) -> None:
        await self.connected.wait()
        self.did.append("connect")

    async def stop_runtime(self, *, stop_head: bool) -> None:
        self.did.append(f"leave, head {stop_head}")

    def holding(self) -> Any:
        return ("job",) if self.held else ()

    def __getattr__(self, name: str) -> Any:
        async def did(**how: Any) -> None:
            self.did.append(" ".join([name, *(f"{key}={value}" for key, value in how.items())]))

        return did


class RuntimeOf:
    """The world in the role of the runtime: its ``stop`` is not the request to stop."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, {"stop": "stop_runtime"}.get(name, name))


def world_of(**fields: Any) -> World:
    world = World(**fields)
    world.daemon._runtime = RuntimeOf(world)  # type: ignore[assignment]
    return world


START = ["recover", "connect"]


def test_it_recovers_then_connects_then_decides_and_stops_in_the_other_order() -> None:
    async def run() -> None:
        world = world_of()
        await world.daemon.start_unless_stopped()
        assert world.ready.is_set()
        await asyncio.sleep(0)
        world.daemon.stop()
        await world.daemon.run()
        assert world.did[:2] == START
        assert world.did[-4:] == ["detach", "settle reports", "leave, head True", "close"]
        assert {"loop", "prepare"} <= set(world.did)

    asyncio.run(run())


def test_the_head_stays_while_jobs_have_gangs() -> None:
    async def run() -> None:
        world = world_of(holding=True)
        await world.daemon.start_unless_stopped()
        world.daemon.stop()
        await world.daemon.run()
        assert "leave, head False" in world.did

    asyncio.run(run())


def test_a_request_to_stop_cuts_a_start_short_and_takes_it_back() -> None:
    async def run() -> None:
        world = world_of()
        world.connected.clear()
        starting = asyncio.create_task(world.daemon.start_unless_stopped())
        async with asyncio.timeout(300):
            await world.recovered.wait()
        world.daemon.stop()
        await starting
        await world.daemon.run()
        assert world.did == ["recover", "abandon", "close"]
        assert not world.ready.is_set()

    asyncio.run(run())


def test_jobs_are_drained_where_that_is_asked_for() -> None:
    async def run() -> None:
        world = world_of(holding=True)
        await world.daemon.start_unless_stopped()
        world.stop.stop_jobs = True
        world.daemon.stop()
        await world.daemon.run()
        assert world.did.index("drain") < world.did.index("detach")

    asyncio.run(run())


def test_a_task_that_fails_ends_it_and_is_told() -> None:
    async def run() -> None:
        world = world_of()
        world.error = ValueError("the loop is broken")
        await world.daemon.start_unless_stopped()
        world.stop.stop_jobs = True
        with pytest.raises(ValueError, match="the loop is broken"):
            await world.daemon.run()
        assert "drain" not in world.did
        assert world.did[-2:] == ["leave, head False", "close"]

    asyncio.run(run())


async def fails() -> None:
    raise ValueError("broken")


async def sleeps() -> None:
    await asyncio.Event().wait()


def test_a_supervised_task_that_fails_ends_the_daemon() -> None:
    async def run() -> None:
        ended = asyncio.Event()
        background = Background(ended.set, LOG)
        background.supervise(sleeps(), "sleeps")
        background.supervise(fails(), "fails")
        async with asyncio.timeout(300):
            await ended.wait()
        assert str(background.failure) == "broken"
        await background.end()
        assert background.uncancelled == set()

    asyncio.run(run())


def test_another_one_does_not() -> None:
    async def run() -> None:
        told: list[str] = []
        background = Background(lambda: told.append("ended"), LOG)
        background.spawn(fails())
        returned = asyncio.Event()

        async def returns() -> None:
            returned.set()

        background.supervise(returns(), "returns")
        async with asyncio.timeout(300):
            await returned.wait()  # it was made last
        await background.end()
        assert (told, background.failure) == ([], None)

    asyncio.run(run())


def test_a_task_that_does_not_end_is_known() -> None:
    async def run() -> None:
        release = asyncio.Event()

        async def deaf() -> None:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        background = Background(lambda: None, LOG, end_seconds=0.05)
        background.spawn(deaf())
        await asyncio.sleep(0)
        await background.end()
        assert len(background.uncancelled) == 1
        release.set()
        await asyncio.wait(background.uncancelled)

    asyncio.run(run())


SCRIPT = """
import asyncio, os, sys
from orchestrator.api.launch import ServeOptions
from orchestrator.daemon.bootstrap import build
from orchestrator.daemon.process import serve
from orchestrator.spec.settings import Settings

async def deaf():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

def parts(*args):
    made = build(*args)

    async def start():
        made.background.spawn(deaf())
        await asyncio.sleep(0)
        made.background.failure = ValueError("what it died of")
        made.daemon.stop()

    made.daemon.start, made.background._end_seconds = start, 0.2
    return made

serve.build = parts
sys.exit(serve.serve(Settings.from_environ(os.environ), ServeOptions(read_listen="")))
"""


def test_it_is_named_and_left_behind_and_what_the_daemon_died_of_is_told(tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "ORCH_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "daemon.task_does_not_end" in done.stderr
    assert "ValueError: what it died of" in done.stderr
    assert not (home / "run/orch.sock").exists()
