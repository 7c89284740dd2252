"""Effects are carried out once, retried when they fail, and replaced by newer ones; gangs are attached once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from orchestrator.core import events as ev
from orchestrator.core.facts.faults import ActorMissing, HeadLost
from orchestrator.core.lifecycle.advance import Ensure, KillRanks, advance
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.states import FailureClass
from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.gangs.gangs import Gangs
from orchestrator.runtime.gangs.table import GangTable
from orchestrator.runtime.nodes.directories import gang_name
from orchestrator.spec.paths import Paths
from tests.unit.core.builders import T0, changed, make_spec, pending, running

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from orchestrator.core.job.record import Job

JOB = running(pending(make_spec(workers=2)))
ENSURE = Ensure(JOB.id, 1, JOB.gang)
KILL = KillRanks(JOB.id, 1, JOB.gang)


class RayActors:
    """Actors that are made on request; ``slow`` delays the first call."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.slow: asyncio.Event | None = None
        self.unknown: dict[tuple[str, int], int] = {}

    def find_or_create(self, job: Job, *, create: bool) -> list[Any]:
        self.asked.append(f"find create={create}")
        return [f"actor {rank}" for rank in range(job.num_workers)]

    def remove(self, _: Job) -> None:
        self.asked.append("remove")

    def end_unknown(self, _: Collection[Job]) -> dict[tuple[str, int], int]:
        return self.unknown

    async def call(self, function: Any) -> Any:
        if self.slow is not None:
            slow, self.slow = self.slow, None
            await slow.wait()
        return function()


class World:
    """Gangs with launches that fail as set, and the events that they posted."""

    def __init__(self, tmp_path: Path, *failures: Exception) -> None:
        self.failures, self.did, self.posted = list(failures), list[str](), list[Any]()
        self.actors, self.done = RayActors(), asyncio.Event()
        self.table = GangTable(self.actors, self.actors.call)  # type: ignore[arg-type]
        self.silent: dict[str, str] = {}
        self.head_ends = False
        self.nodes_lost = 0
        self.gangs = Gangs(
            self.table,
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            Paths(home=tmp_path, socket=tmp_path / "s"),
            silent=lambda: self.silent,
            check_head=self.check_head,
            post=self.post,
            log=structlog.get_logger(),
        )

    def post(self, events: Any) -> None:
        self.posted.extend(events)
        self.done.set()

    async def check_head(self, *, node_lost: bool = False) -> None:
        self.nodes_lost += node_lost
        if self.head_ends:
            self.gangs.forget_all()
            await asyncio.sleep(0)

    async def ensure(self, _: Job) -> None:
        self.did.append("ensure")
        if self.failures:
            raise self.failures.pop(0)
        self.done.set()
        await asyncio.Event().wait()

    async def kill(self, _: Job) -> None:
        self.did.append("kill")
        self.done.set()

    async def confirm_gone(self, gangs: Mapping[tuple[str, int], int]) -> None:
        self.did.append("confirm " + " ".join(gang_name(*gang) for gang in gangs))

    async def end(self, _: Job) -> None:
        self.did.append("end")
        if self.failures:
            raise self.failures.pop(0)
        self.done.set()

    async def bring_ends(self, _: Job) -> None:
        self.did.append("bring ends")

    async def close(self) -> None:
        self.did.append("close")

    async def until_done(self) -> None:
        async with asyncio.timeout(300):
            await self.done.wait()
        self.done.clear()


@pytest.mark.parametrize("name", ["attempt-3", "attempt-0003"])
def test_what_the_records_do_not_know_is_ended_and_told(tmp_path: Path, name: str) -> None:
    world = World(tmp_path)
    paths = Paths(home=tmp_path, socket=tmp_path / "s")
    (paths.exits(JOB.id) / name).mkdir(parents=True)
    (paths.logs(JOB.id) / "attempt-1").mkdir(parents=True)
    world.actors.unknown = {(JOB.id, 2): 2, ("other-aaaaaa", 1): 1}
    asyncio.run(world.gangs.survey([JOB]))
    assert world.did == [f"confirm {JOB.id}-g2 other-aaaaaa-g1"]
    (found,) = world.posted
    assert isinstance(found, ev.LaterAttemptsFound)
    assert (found.job_id, found.attempt, found.gang) == (JOB.id, 3, 2)
    job = fold(JOB, found)
    assert (job.gang_lost, job.next_attempt, job.next_gang) == (True, 4, 3)
    assert fold(job, found) is job
    (failed,) = advance(job, T0 + 20).events
    assert isinstance(failed, ev.AttemptFailed)
    assert (failed.retry, failed.failure.failure_class) == (True, FailureClass.PREEMPTION)


def test_what_the_records_know_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    paths = Paths(home=tmp_path, socket=tmp_path / "s")
    for name in ("attempt-1", "attempt-x", "attempt-1.old", "attempt-12345678901"):
        (paths.exits(JOB.id) / name).mkdir(parents=True)
    asyncio.run(world.gangs.survey([JOB]))
    assert (world.did, world.posted) == ([], [])


def test_a_gang_that_was_given_up_is_ended_when_it_can_be_and_nothing_is_posted(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path, TimeoutError("still there"), OSError("no answer"))
        world.gangs.apply(JOB, None)
        world.gangs.abandon(JOB)
        await world.until_done()
        assert (world.did, world.posted) == (["end"] * 3, [])
        world.failures = [TimeoutError("still there")] * 1000
        world.gangs.abandon(JOB)
        await asyncio.sleep(0)
        await world.gangs.close()
        assert world.did[3:] == ["end", "close"]

    asyncio.run(run())


def test_an_effect_is_retried_and_a_newer_one_replaces_it(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path, RuntimeError("first"))
        world.gangs.apply(JOB, ENSURE)
        world.gangs.apply(JOB, ENSURE)
        await world.until_done()
        assert world.did == ["ensure", "ensure"], "the same effect again changes nothing"
        world.gangs.apply(JOB, KILL)
        await world.until_done()
        assert world.did[2:] == ["kill"]
        await world.gangs.close()
        assert world.posted == []

    asyncio.run(run())


@pytest.mark.parametrize("node_lost", [False, True])
def test_a_lost_gang_is_told_with_what_is_known_of_its_ends(tmp_path: Path, node_lost: bool) -> None:
    async def run() -> None:
        world = World(tmp_path, GangLostError(ActorMissing(rank=1), node_lost=node_lost))
        world.gangs.apply(JOB, ENSURE)
        await world.until_done()
        assert world.did == ["ensure", "bring ends"]
        assert world.nodes_lost == node_lost, "an embedded head may have gone with its node"
        told = [(event.kind, event.rank, event.not_before > 0) for event in world.posted]
        assert told == [("gang_lost", 1, node_lost)], "a lost node's ranks end by themselves after a while"
        await world.gangs.close()

    asyncio.run(run())


@pytest.mark.parametrize("failure", [GangLostError(ActorMissing(rank=1)), RuntimeError("no answer")])
def test_what_fails_on_a_head_that_is_ending_is_not_tried_again_on_it(tmp_path: Path, failure: Exception) -> None:
    async def run() -> None:
        world = World(tmp_path, failure)
        world.head_ends = True
        await world.table.attach(JOB)
        world.gangs.apply(JOB, ENSURE)
        task = world.gangs._work[JOB.id].task
        async with asyncio.timeout(300):
            await asyncio.wait([task])
        assert task.cancelled()
        assert world.did == ["ensure"]
        assert [(event.kind, event.reason) for event in world.posted] == [("gang_lost", HeadLost())]

    asyncio.run(run())


def test_every_gang_is_lost_with_the_head(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        await world.table.attach(JOB)
        world.gangs.forget_all()
        assert [(event.kind, event.reason) for event in world.posted] == [("gang_lost", HeadLost())]
        assert world.table.known(JOB.id) is None

    asyncio.run(run())


def test_ranks_on_silent_nodes_make_a_job_degraded_until_they_answer(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.silent = {"a": "its raylet does not answer"}
    world.gangs.report_reachability([JOB])
    assert [(event.note.code, event.degraded) for event in world.posted] == [("unreachable", True)]
    world.silent = {}
    world.gangs.report_reachability([changed(JOB, degraded=True)])
    assert [(event.note.code, event.degraded) for event in world.posted[1:]] == [("reachable", False)]


def test_a_gang_is_attached_once_and_calls_about_it_keep_their_order(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        world.actors.slow = slow = asyncio.Event()
        attaching = asyncio.create_task(world.table.attach(JOB))
        await asyncio.sleep(0)
        attaching.cancel()  # a newer effect replaces it; its request to Ray continues
        removing = asyncio.create_task(world.table.remove(JOB))
        await asyncio.sleep(0)
        slow.set()
        await removing
        assert world.actors.asked == ["find create=True", "remove"]
        gang = await world.table.attach(JOB, create=False)
        assert await world.table.attach(JOB) is gang
        assert world.actors.asked[2:] == ["find create=False"]
        assert world.table.watched(JOB) is None, "its ranks are not up"
        gang.begin(JOB.attempt_number)
        assert world.table.watched(JOB) is gang
        await world.table.close()

    asyncio.run(run())
