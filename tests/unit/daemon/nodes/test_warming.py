"""Fork servers and idle workers are asked for once for each node and gang."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from orchestrator.daemon.nodes.fork_servers import ForkServers
from orchestrator.daemon.nodes.idle_workers import IdleWorkers
from tests.unit.core.builders import node, running
from tests.unit.daemon.parts import Spawned


def test_a_fork_server_is_started_once_on_each_node_that_takes_ranks() -> None:
    started: list[str] = []

    def agent(name: str) -> Any:
        async def fork_server(_python: str) -> None:
            started.append(name)
            if name == "b":
                raise RuntimeError("no memory")

        return SimpleNamespace(fork_server=SimpleNamespace(remote=fork_server))

    agents = {name: agent(name) for name in ("a", "b", "head")}
    nodes = [node("a", cpus=4), node("b", cpus=4), node("head", cpus=0)]

    async def run() -> None:
        servers = ForkServers(lambda: agents, lambda: nodes)
        await servers.warm()
        await servers.warm()
        assert sorted(started) == ["a", "b"]
        gone = agents.pop("a")
        await servers.warm()
        agents["a"] = gone  # the node is back, with another agent
        await servers.warm()
        assert sorted(started) == ["a", "a", "b"]

    asyncio.run(run())


def test_each_gang_has_as_many_workers_made_again_and_no_more_than_eight() -> None:
    asked: list[Mapping[str, int]] = []

    async def warm(placed: Mapping[str, int]) -> None:
        asked.append(placed)

    async def run() -> None:
        spawned = Spawned()
        idle = IdleWorkers(warm, spawned, later_seconds=0.0)
        job = running()
        idle.changed(job)
        idle.changed(job)
        await spawned.run()
        idle.ended(job.id)
        idle.changed(job)
        await spawned.run()
        assert asked == [Counter(job.nodes)] * 2
        big: Any = SimpleNamespace(id="big", gang=1, seats=(None,) * 12, nodes=("a",) * 7 + ("b",) * 5)
        idle.changed(big)
        await spawned.run()
        assert asked[-1] == {"a": 7, "b": 1}

    asyncio.run(run())
