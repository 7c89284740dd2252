"""Queues that are changed while the daemon runs, and the report of shares."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.errors import BadRequestError, DiskFullError
from orchestrator.api.requests import QueueChange
from orchestrator.core.scheduler.live_jobs import LiveJobs
from orchestrator.core.scheduler.shares import Sharing
from orchestrator.daemon.loop import Published
from orchestrator.daemon.requests.queues import Queues
from orchestrator.daemon.sharing import SharingState
from orchestrator.runtime.pools import Pools
from orchestrator.spec.queues import QueueSpec, parse_queues
from orchestrator.store.errors import StoreError
from orchestrator.store.records import StoredQueueChange
from orchestrator.store.store import Store
from tests.support.stores import new_store
from tests.unit.core.builders import T0, make_spec, node, nodes, pending, running
from tests.unit.daemon.parts import ADA, BOB, Rounds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def with_desk(story: Callable[[Queues, Rounds], Awaitable[None]], queues: str = "") -> None:
    async def run() -> None:
        async with asyncio.timeout(300), Rounds() as rounds:
            rounds.loop.shares = SharingState(Sharing(queues=parse_queues(queues), ageing=1e12))
            await story(Queues(rounds.loop, rounds.store, Pools().outlook), rounds)

    asyncio.run(run())


def test_the_outlook_of_jobs_is_that_of_the_loop_with_their_own_progress() -> None:
    async def story(_: Queues, rounds: Rounds) -> None:
        busy = running(pending(make_spec(workers=8), job_id="busy-aaaaaa", user="bob"), nodes=("a",) * 8)
        late = pending(make_spec(workers=4), sequence=2, job_id="late-aaaaaa")
        rounds.loop.jobs = Published([busy, late])
        rounds.loop.decided = LiveJobs([busy, late])
        rounds.loop.nodes = nodes(node("a", gpus=8))
        now = rounds.loop.now()
        desk = Queues(rounds.loop, rounds.store, Pools().outlook, lambda job: 60.0 if job.id == busy.id else None)
        found = await desk.outlook(late.id)
        assert found.starts_at == pytest.approx(now + 60, abs=5)
        [holder] = found.holders
        assert (holder.job_id, holder.user, holder.gpus, holder.basis) == (busy.id, "bob", 8.0, "its progress")
        first = await desk.outlook(None)
        assert (first.starts.keys(), first.order) == ({late.id}, (late.id,))

    with_desk(story)


def test_a_queue_is_made_and_changed_and_survives_a_restart() -> None:
    async def story(desk: Queues, rounds: Rounds) -> None:
        made = await desk.change("research", QueueChange(guaranteed=2, maximum=8, weight=3.0), ADA)
        assert (made.guaranteed, made.maximum, made.weight, made.changed_by) == (2, 8, 3.0, "ada")
        changed = await desk.change("research", QueueChange(unbounded=True, parent="lab"), BOB)
        assert (changed.guaranteed, changed.maximum, changed.parent, changed.changed_by) == (2, None, "lab", "bob")
        assert changed.changed_at is not None
        book = SharingState(Sharing(queues=parse_queues("lab")))
        await book.load(rounds.store, [], T0)
        assert book.sharing.queues == rounds.loop.shares.sharing.queues
        assert book.changes["research"].by == "bob"
        assert [change.by for change in await rounds.store.queue_changes()] == ["ada", "bob"]

    with_desk(story, "lab")


def test_a_table_that_cannot_be_used_is_refused_and_nothing_is_written() -> None:
    async def story(desk: Queues, rounds: Rounds) -> None:
        with pytest.raises(
            BadRequestError, match=r"guaranteed=3 is more than maximum=2.*its parent 'gone' is not a queue"
        ):
            await desk.change("research", QueueChange(guaranteed=3, maximum=2, parent="gone"), ADA)
        assert await rounds.store.queue_changes() == []
        assert rounds.loop.shares.sharing.queues == ()

    with_desk(story)


def test_a_change_that_cannot_be_written_does_not_count() -> None:
    class Full(Store):
        async def put_queue_change(self, change: StoredQueueChange) -> None:
            raise StoreError("no space left")

    async def story(_: Queues, rounds: Rounds) -> None:
        with pytest.raises(DiskFullError, match="the change of queue research could not be written: no space left"):
            await Queues(rounds.loop, new_store(Full), Pools().outlook).change("research", QueueChange(weight=2.0), ADA)
        assert rounds.loop.shares.sharing.queues == ()

    with_desk(story)


def test_what_no_longer_follows_from_the_settings_is_left_out() -> None:
    async def run() -> None:
        store = new_store()
        for name, body in (
            ("child", {"name": "child", "parent": "gone"}),
            ("later", {"name": "later", "colour": "red"}),
            ("other", {"name": "else"}),
            ("damaged", {"name": "damaged", "weight": "much"}),
            ("fine", {"name": "fine", "weight": 2.0}),
        ):
            await store.put_queue_change(StoredQueueChange(name=name, body=body, by="ada", at=T0))
        book = SharingState()
        assert await book.load(store, [], T0) == ("child", "later", "other", "damaged")
        assert book.sharing.queues == (QueueSpec(name="fine", weight=2.0),)

    asyncio.run(run())


def test_what_is_told_is_order_shares_and_quotas() -> None:
    async def story(desk: Queues, rounds: Rounds) -> None:
        held = running(pending(make_spec(workers=4, queue="vision"), job_id="runs"), nodes=("a",) * 4)
        wait = [
            pending(make_spec(workers=8, queue="vision", priority=90), sequence=2, job_id="second"),
            pending(make_spec(workers=8, queue="prod"), sequence=3, job_id="first", user="bob"),
            pending(make_spec(workers=1, queue="old"), sequence=4, job_id="third"),
        ]
        rounds.loop.jobs = Published((held, *wait))
        rounds.loop.nodes = nodes(node("a", gpus=8))
        shares = await desk.shares()
        assert shares.order == ("first", "third", "second")
        found = {queue.name: queue for queue in shares.queues}
        assert list(found) == ["lab", "vision", "prod", "old"], "each under its parent"
        assert (found["lab"].gpus, found["lab"].running, found["lab"].waiting) == (4.0, 1, 1)
        assert found["vision"].parent == "lab"
        assert found["vision"].fair_share == pytest.approx(1.2)
        assert (found["prod"].guaranteed, found["prod"].fair_share) == (2, 5.6)
        assert [(user.queue, user.user, user.gpus, user.waiting) for user in shares.users] == [
            ("old", "ada", 0.0, 1),
            ("prod", "bob", 0.0, 1),
            ("vision", "ada", 4.0, 1),
        ]

    with_desk(story, "lab; vision parent=lab; prod guaranteed=2 weight=3")
