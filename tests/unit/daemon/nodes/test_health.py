"""Strikes against nodes are tracked, stored and acted on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from orchestrator.core.facts.faults import CheckFailed
from orchestrator.daemon.nodes.care import LoopNodes, NodeHealth, check_node
from orchestrator.daemon.nodes.quarantine import NodeQuarantine
from orchestrator.daemon.stopping import StopRequest
from orchestrator.store.errors import StoreError
from orchestrator.store.store import Store
from tests.support.stores import new_store
from tests.unit.core.builders import node, released, running
from tests.unit.daemon.parts import LOG, FakeConnection, FakeRegistry, Rounds, Spawned


class FullDisk(Store):
    full = True

    async def put_places(self, places: Any) -> None:
        if self.full:
            raise StoreError("no space left")
        await super().put_places(places)


def test_what_cannot_be_written_is_written_later() -> None:
    async def run() -> None:
        store, quarantine, spawned, reserved = new_store(FullDisk), NodeQuarantine(), Spawned(), list[str]()

        async def reserve() -> None:
            reserved.append("asked")

        rounds = Rounds(store)
        health = NodeHealth(
            quarantine,
            store,
            FakeConnection(),
            FakeRegistry(),
            LoopNodes(rounds.loop, quarantine, StopRequest()),
            reserve=reserve,
            spawn=spawned,
            log=LOG,
        )
        quarantine.cordon("a", "host-a", "ada")
        job = running()
        health.observe(job, released(job))
        await spawned.run()
        assert await store.places() == []
        store.full = False
        await health.look()
        assert [place.name for place in await store.places()] == ["a"]
        assert reserved == ["asked"]  # by ``look``: no GPU is quarantined, so the gang's end requested nothing

    asyncio.run(run())


def test_a_check_says_why_it_did_not_end() -> None:
    async def broken() -> tuple[str, ...]:
        raise RuntimeError("the actor died")

    async def well() -> tuple[str, ...]:
        return ()

    def agent(answer: Any) -> Any:
        return SimpleNamespace(check=answer)

    assert asyncio.run(check_node(None)) == (CheckFailed(),)
    assert asyncio.run(check_node(agent(broken))) == (CheckFailed(said="the actor died"),)
    assert asyncio.run(check_node(agent(well))) == ()


def test_nodes_are_marked_when_a_check_changes_something() -> None:
    async def run() -> None:
        store, rounds, quarantine = new_store(), Rounds(), NodeQuarantine()
        nodes = LoopNodes(rounds.loop, quarantine, StopRequest())
        nodes.set({"a": node("a")})

        async def look(check: Any) -> bool:
            quarantine.cordon("a", "a", "a check")
            return bool(await check("a"))

        quarantine.look = look  # type: ignore[method-assign]
        health = NodeHealth(
            quarantine,
            store,
            FakeConnection(),
            FakeRegistry(),
            nodes,
            reserve=lambda: asyncio.sleep(0),
            spawn=Spawned(),
            log=LOG,
        )
        await health.look()
        assert rounds.loop.nodes["a"].cordoned

    asyncio.run(run())
