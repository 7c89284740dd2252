"""Cordon, drain, uncordon, labels and reservations."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator.api.errors import BadRequestError, DiskFullError, NoSuchNodeError
from orchestrator.api.requests import NodeChange, ReservationRequest
from orchestrator.api.service import NodeVerb
from orchestrator.core.facts.reasons import ByNodeDrain
from orchestrator.core.scheduler.live_jobs import LiveJobs
from orchestrator.daemon.nodes.care import LoopNodes
from orchestrator.daemon.nodes.quarantine import NodeQuarantine
from orchestrator.daemon.nodes.requests import NodeActions
from orchestrator.daemon.stopping import StopRequest
from orchestrator.store.errors import StoreError
from tests.support.records import replace
from tests.unit.core.builders import node, running
from tests.unit.daemon.parts import ADA, BOB, Rounds, Spawned


class World:
    def __init__(self, rounds: Rounds) -> None:
        self.rounds, self.quarantine, self.spawned = rounds, NodeQuarantine(), Spawned()
        nodes = LoopNodes(rounds.loop, self.quarantine, StopRequest())
        self.reserved = 0
        self.actions = NodeActions(
            rounds.loop, self.quarantine, rounds.store, nodes, reserve=self.reserve, spawn=self.spawned
        )
        nodes.set({"a1": node("a1"), "a2": node("a2")})

    async def reserve(self) -> None:
        self.reserved += 1


def test_a_cordon_is_written_and_seen_by_the_loop() -> None:
    async def run() -> None:
        world = World(Rounds())
        reply = await world.actions.act("a1", NodeVerb.CORDON, ADA)
        await world.spawned.run()
        assert (reply.state, reply.jobs, world.reserved) == ("CORDONED", (), 1)
        assert world.rounds.loop.nodes["a1"].cordoned
        assert len(await world.rounds.store.places()) == 1
        assert (await world.actions.act("a1", NodeVerb.UNCORDON, ADA)).state == "READY"
        await world.spawned.run()
        assert not world.rounds.loop.nodes["a1"].cordoned

    asyncio.run(run())


def test_a_drain_asks_the_jobs_on_the_node_to_move() -> None:
    async def run() -> None:
        world = World(Rounds())
        job = running(nodes=("a1", "a1"))
        world.rounds.loop.decided = LiveJobs([job])
        made: list[Any] = []

        async def command(make: Any) -> None:
            made.extend(make())

        world.rounds.loop.command = command  # type: ignore[method-assign]
        reply = await world.actions.act("a1", NodeVerb.DRAIN, ADA)
        await world.spawned.run()
        assert reply.jobs == (job.id,)
        assert [(event.kind, event.by) for event in made] == [("stop_requested", ByNodeDrain(name="ada"))]

    asyncio.run(run())


def test_a_name_must_mean_one_node() -> None:
    async def run() -> None:
        world = World(Rounds())
        with pytest.raises(NoSuchNodeError):
            await world.actions.act("b", NodeVerb.CORDON, ADA)
        with pytest.raises(BadRequestError):
            await world.actions.act("a", NodeVerb.CORDON, ADA)

    asyncio.run(run())


def test_a_cordon_that_cannot_be_written_holds_and_says_so() -> None:
    async def run() -> None:
        world = World(Rounds())

        async def full(_: Any) -> None:
            raise StoreError("no space left")

        world.rounds.store.put_places = full  # type: ignore[method-assign]
        with pytest.raises(DiskFullError):
            await world.actions.act("a1", NodeVerb.CORDON, ADA)
        assert [place.name for place in world.quarantine.unsaved()] == ["a1"]

    asyncio.run(run())


def test_labels_are_written_seen_by_the_loop_and_known_to_the_next_daemon() -> None:
    async def run() -> None:
        world = World(Rounds())
        reply = await world.actions.change("a1", NodeChange(labels={"net": "ib", "disk": "nvme"}), ADA)
        assert reply.message == "a1: its labels are disk=nvme, net=ib"
        assert world.rounds.loop.nodes["a1"].labels == {"disk": "nvme", "net": "ib"}
        await world.actions.act("a1", NodeVerb.UNCORDON, ADA)
        await world.actions.change("a1", NodeChange(labels={"net": None, "disk": "ssd"}), ADA)
        assert world.rounds.loop.nodes["a1"].labels == {"disk": "ssd"}, "an uncordon leaves labels"
        with pytest.raises(BadRequestError, match="a1 has no label net") as caught:
            await world.actions.change("a1", NodeChange(labels={"net": None}), ADA)
        assert caught.value.hint == "its labels are disk=ssd"
        with pytest.raises(BadRequestError, match="at most 64 labels"):
            await world.actions.change("a1", NodeChange(labels={f"key-{n}": "" for n in range(64)}), ADA)
        with pytest.raises(NoSuchNodeError):
            await world.actions.change("b", NodeChange(labels={"disk": "ssd"}), ADA)
        later = NodeQuarantine()
        later.restore(await world.rounds.store.places())
        assert later.mark({"a1": node("a1")})["a1"].labels == {"disk": "ssd"}
        anew = later.mark({"n7": replace(node("n7"), name="a1")})
        assert anew["n7"].labels == {"disk": "ssd"}, "Ray gave it another id"

    asyncio.run(run())


def test_reservations_are_written_seen_by_the_loop_and_known_to_the_next_daemon() -> None:
    async def run() -> None:
        world = World(Rounds())
        now = world.rounds.loop.now()
        world.quarantine._clock = world.rounds.loop.now  # the clock of the test's loop
        later = ReservationRequest(start=now + 3600, seconds=600, reason="new driver")
        world.rounds.loop.decided = LiveJobs([running(nodes=("a1", "a1"))])
        reply = await world.actions.change("a1", NodeChange(reserve=later), ADA)
        assert reply.message == "a1 is reserved (r1); 1 job there now: what still runs at its start is stopped"
        reply = await world.actions.change("a1", NodeChange(reserve=ReservationRequest(start=now, seconds=60)), BOB)
        assert reply.state == "RESERVED"
        known = world.rounds.loop.nodes["a1"].reservations
        assert [(r.id, r.start - now, r.end - now, r.by) for r in known] == [
            ("r2", 0, 60, "bob"),
            ("r1", 3600, 4200, "ada"),
        ]
        again = NodeQuarantine(world.rounds.loop.now)
        again.restore(await world.rounds.store.places())
        assert again.mark({"a1": node("a1")})["a1"].reservations == known
        for wrong, said in (
            (NodeChange(unreserve=""), "a1 has 2 reservations"),
            (NodeChange(unreserve="r7"), "a1 has no reservation r7"),
            (NodeChange(reserve=ReservationRequest(start=now - 60, seconds=60)), "would have ended already"),
            (NodeChange(), "give either labels"),
            (NodeChange(labels={"disk": "ssd"}, unreserve="r2"), "give either labels"),
            (NodeChange(reserve=later, unreserve="r2"), "give either labels"),
        ):
            with pytest.raises(BadRequestError, match=said):
                await world.actions.change("a1", wrong, ADA)
        reply = await world.actions.change("a1", NodeChange(unreserve="r2"), ADA)
        assert (reply.state, reply.message) == ("READY", "reservation r2 of a1 is removed")
        await world.actions.change("a1", NodeChange(unreserve=""), ADA)
        assert world.rounds.loop.nodes["a1"].reservations == ()
        last = NodeQuarantine(world.rounds.loop.now)
        last.restore(await world.rounds.store.places())
        assert last.mark({"a1": node("a1")})["a1"].reservations == ()

    asyncio.run(run())
