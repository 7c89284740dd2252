"""Fork servers and idle workers are requested once for each node and gang."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from orchestrator.core.scheduler.live_jobs import LiveJobs
from orchestrator.daemon.nodes.care import ForkServers, IdleWorkers, can_start_more
from tests.unit.core.builders import make_spec, node, pending, running
from tests.unit.daemon.parts import Spawned


def test_a_fork_server_is_started_once_on_each_node_that_takes_ranks() -> None:
    started: list[str] = []

    def agent(name: str) -> Any:
        async def fork_server(_python: str) -> None:
            started.append(name)
            if name == "b":
                raise RuntimeError("no memory")

        return SimpleNamespace(fork_server=fork_server)

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
        idle = IdleWorkers(warm, spawned, useful=lambda: True, later_seconds=0.0)
        job = running()
        idle.changed(job)
        idle.changed(job)
        await spawned.run()
        assert asked == [Counter(job.nodes)]
        nodes = ("a",) * 7 + ("b",) * 5
        seats = tuple(SimpleNamespace(node_id=name, actor_pid=number) for number, name in enumerate(nodes))
        big: Any = SimpleNamespace(id="big", gang=1, seats=seats, nodes=nodes)
        idle.changed(big)
        await spawned.run()
        assert asked[-1] == {"a": 7, "b": 1}

    asyncio.run(run())


def gang(ranks: int, *, cpu: float = 0, gpu: float = 0) -> LiveJobs:
    """Return live jobs with one job, which runs on node "a"."""
    return LiveJobs([running(pending(make_spec(workers=ranks, cpu=cpu, gpu=gpu)))])


def test_on_nodes_with_gpus_these_say_whether_there_is_room() -> None:
    eight = {"a": node("a", cpus=64, gpus=8)}
    assert not can_start_more(gang(8, gpu=1), eight)
    assert can_start_more(gang(4, gpu=1), eight)
    assert can_start_more(gang(7, gpu=0.5), eight)
