"""The daemon's life: the order of its start and its stop, and a request to stop during the start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator.daemon.daemon import Background, Daemon
from orchestrator.daemon.stopping import StopRequest
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
