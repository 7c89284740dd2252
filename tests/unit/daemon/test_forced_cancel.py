"""What a job's end waits for, on the production loop and the in-memory runtime.

Its outputs, for which no other job waits; and its gang, which `orch cancel --force` gives up on a node that does not answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator.core.facts.reasons import ByForce, Cancelled
from orchestrator.core.lifecycle.advance import FORCE_SECONDS, request_force
from orchestrator.core.states import JobState
from orchestrator.daemon.loop import Loop
from orchestrator.runtime.memory import faults as f
from orchestrator.runtime.memory.cluster import MemoryCluster, Script
from orchestrator.runtime.memory.gangs import MemoryGangs
from tests.support.stores import new_store
from tests.unit.core.builders import ID, T0, make_spec, node, submission
from tests.unit.daemon.parts import LOG

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job


class World:
    """A daemon with one job of two ranks on node ``a``, the only one with GPUs."""

    def __init__(self, script: Script) -> None:
        self.cluster = MemoryCluster([node("a", gpus=4), node("b", gpus=0)], now=T0, script_of=lambda _: script)
        self.store = new_store()
        self.start()

    def start(self) -> None:
        self.loop = Loop(
            store=self.store,
            runtime=lambda: self.gangs,
            on_change=lambda _: None,
            on_end=lambda _: None,
            log=LOG,
            clock=self.cluster.clock(),
        )
        self.gangs = MemoryGangs(self.cluster, post=self.loop.post)
        self.loop.set_nodes(self.cluster.views())

    async def submit(self) -> None:
        job, _ = await self.store.submit(submission(make_spec(workers=2, gpu=1)))
        self.loop.add(job)
        await self.run(5.0)
        assert (await self.job()).state is JobState.RUNNING

    async def job(self) -> Job:
        return await self.store.job(ID)

    async def run(self, seconds: float) -> None:
        until = self.cluster.now() + seconds
        while True:
            self.loop.set_nodes(self.cluster.views())
            await self.loop.step()
            if not self.loop.woken and not self.cluster.step(until):
                break
        self.cluster.run_until(until)
        await self.loop.step()

    async def force(self) -> Job:
        made = asyncio.create_task(
            self.loop.command(lambda: request_force(self.loop.decided[ID], "root", self.cluster.now()))
        )
        await asyncio.sleep(0)
        await self.loop.step()
        await made
        return await self.job()

    def inject(self, fault: f.Fault) -> None:
        fault.inject(self.cluster)

    @property
    def alive(self) -> int:
        return len(list(self.cluster.processes.of(ID)))


def test_a_job_on_a_node_that_never_answers_is_removed_and_what_is_left_of_it_is_ended_when_it_does() -> None:
    async def story() -> None:
        world = World(Script(seconds=1e6))
        await world.submit()
        world.inject(f.NodeSilent(node="a"))
        assert (await world.force()).state is JobState.DRAINING
        await world.run(FORCE_SECONDS - 1)
        assert (await world.force()).state is JobState.DRAINING, "its end may still be confirmed"
        await world.run(2.0)
        ended = await world.force()
        assert (ended.state, ended.reason) == (JobState.CANCELLED, Cancelled(by=ByForce(name="root")))
        assert ID not in world.loop.jobs
        assert world.alive == 2, "this is what was given up"
        await world.run(100.0)
        world.inject(f.NodeAnswers(node="a"))
        await world.run(100.0)
        assert world.alive == 0
        assert not world.cluster.nodes["a"].held
        assert await world.job() == ended

    asyncio.run(story())


def test_ranks_that_end_well_after_it_make_no_success() -> None:
    async def story() -> None:
        world = World(Script(seconds=30.0))
        await world.submit()
        world.inject(f.NodeSilent(node="a"))
        await world.force()
        await world.run(FORCE_SECONDS + 1)
        assert (await world.force()).state is JobState.CANCELLED
        world.inject(f.NodeAnswers(node="a"))
        await world.run(100.0)
        ended = await world.job()
        assert ended.state is JobState.CANCELLED
        assert await world.store.verify() == []

    asyncio.run(story())


def test_outputs_are_collected_while_the_next_job_uses_the_gpus() -> None:
    async def story() -> None:
        world = World(Script(seconds=50.0, collect_seconds=500.0))
        await world.submit()
        second, _ = await world.store.submit(submission(make_spec(workers=4, gpu=1), job_id="second-abc234"))
        world.loop.add(second)
        await world.run(60.0)
        first = await world.job()
        assert (first.state, first.files_on) == (JobState.RUNNING, ("a", "a"))
        assert first.reason.sentence().endswith("copying its logs and outputs, its GPUs are free")
        assert (await world.store.job(second.id)).state is JobState.RUNNING
        world.gangs.crash()
        jobs = world.loop.jobs
        world.start()  # a daemon that starts again collects them from the beginning, and ends the job then
        for job_id in jobs:
            world.loop.add(await world.store.job(job_id))
        await world.run(490.0)
        assert (await world.job()).state is JobState.RUNNING
        await world.run(20.0)
        assert (await world.job()).state is JobState.SUCCEEDED
        assert await world.store.verify() == []

    asyncio.run(story())


def test_a_job_that_can_end_ends_by_the_first_force() -> None:
    async def story() -> None:
        world = World(Script(seconds=1e6))
        await world.submit()
        assert (await world.force()).state is JobState.DRAINING
        await world.run(5.0)
        ended = await world.job()
        assert ended.state is JobState.CANCELLED
        assert not isinstance(getattr(ended.reason, "by", None), ByForce), "its end was confirmed"
        assert world.alive == 0

    asyncio.run(story())
