"""Care of nodes: the loop receives their state, and submissions wait for them."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.api.errors import DaemonStoppingError
from orchestrator.daemon.nodes.care import HeadCare, LoopNodes, NodeCare
from orchestrator.daemon.nodes.quarantine import NodeQuarantine
from orchestrator.daemon.stopping import StopRequest
from tests.unit.core.builders import node
from tests.unit.daemon.parts import LOG, FakeCluster, Rounds, Spawned


def test_nodes_reach_the_loop_with_their_cordons() -> None:
    rounds, quarantine, stop = Rounds(), NodeQuarantine(), StopRequest()
    nodes = LoopNodes(rounds.loop, quarantine, stop)
    nodes.set({"a": node("a")})
    assert not rounds.loop.nodes["a"].cordoned
    quarantine.cordon("a", "a", "ada")
    nodes.mark_again()
    assert rounds.loop.nodes["a"].cordoned


def test_nothing_is_placed_while_jobs_go_back_to_the_queue() -> None:
    rounds, stop = Rounds(), StopRequest()
    stop.stop_jobs = True
    stop.now()
    LoopNodes(rounds.loop, NodeQuarantine(), stop).set({"a": node("a")})
    assert rounds.loop.nodes == {}


def test_a_submission_waits_for_nodes_and_not_for_ever() -> None:
    async def run() -> None:
        rounds = Rounds()
        nodes = LoopNodes(rounds.loop, NodeQuarantine(), StopRequest())
        with pytest.raises(DaemonStoppingError):
            await nodes.wait(0.01)
        nodes.set({"a": node("a")})
        await nodes.wait(300)
        nodes.forget()
        assert rounds.loop.nodes == {}
        with pytest.raises(DaemonStoppingError):
            await nodes.wait(0.01)

    asyncio.run(run())


def test_a_look_that_fails_is_told_until_one_succeeds() -> None:
    async def run() -> None:
        cluster, problems, rounds = FakeCluster(), dict[str, str](), Rounds()
        cluster.nodes = {"a": node("a")}
        failures: list[Exception] = [RuntimeError("the control plane is away")]

        async def after() -> None:
            if failures:
                raise failures.pop()

        care = NodeCare(
            cluster,
            LoopNodes(rounds.loop, NodeQuarantine(), StopRequest()),
            after=after,
            tidy=lambda: asyncio.sleep(0),
            spawn=Spawned(),
            problems=problems,
        )
        await care.look()
        assert problems == {"nodes": "the cluster's nodes could not be listed: the control plane is away"}
        await care.look()
        assert (problems, cluster.refreshed, list(rounds.loop.nodes)) == ({}, 2, ["a"])
        cluster.ending = True
        await care.look()
        assert (problems, cluster.refreshed) == ({}, 2), "a head that is ending is asked nothing"

    asyncio.run(run())


# -- the head


def test_it_is_started_again_until_it_comes_up() -> None:
    async def run() -> None:
        cluster, woken, problems, done = FakeCluster(), asyncio.Event(), dict[str, str](), list[str]()
        cluster.restarts = [RuntimeError("no port"), None]
        seen: list[str] = []

        async def prepare() -> None:
            seen.append(problems["ray"])

        care = HeadCare(
            cluster,
            forget=(lambda: done.append("gangs"), lambda: done.append("exporters")),
            prepare=(prepare,),
            wake=woken.set,
            problems=problems,
            log=LOG,
            retry_seconds=0.0,
        )
        task = asyncio.create_task(care.run())
        care.lost()
        assert done == ["gangs", "exporters"]
        assert problems == {"ray": "Ray's head died and is being started again"}
        async with asyncio.timeout(300):
            await woken.wait()
        assert seen == ["no port"]  # the failure was reported until the next try succeeded
        assert problems == {}
        assert cluster.restarts == []
        task.cancel()

    asyncio.run(run())


def test_one_that_dies_while_jobs_are_prepared_is_started_again_at_once() -> None:
    """Requests to its agents may never be answered: Ray waits for a minute for those that end with a raylet."""

    async def run() -> None:
        cluster, woken = FakeCluster(), asyncio.Event()
        cluster.restarts = [None, None]
        asked: list[str] = []

        async def prepare() -> None:
            asked.append("of a head")
            if len(asked) == 1:
                care.lost()
                await asyncio.Event().wait()

        care = HeadCare(
            cluster,  # type: ignore[arg-type]
            forget=(),
            prepare=(prepare,),
            wake=woken.set,
            problems={},
            log=LOG,
            retry_seconds=1e9,
        )
        task = asyncio.create_task(care.run())
        care.lost()
        async with asyncio.timeout(300):
            await woken.wait()
        assert asked == ["of a head"] * 2
        assert cluster.restarts == []
        task.cancel()

    asyncio.run(run())
