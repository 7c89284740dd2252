"""Decisions of the loop are shown, reported and carried out once they are stored, and not before."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, cast

import pytest
import structlog

from orchestrator.core.events import JobUpdated
from orchestrator.core.facts.reasons import ByUser
from orchestrator.core.lifecycle.advance import Ensure, request_stop
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.daemon.loop import Loop
from orchestrator.store.errors import VersionConflictError
from orchestrator.store.store import Store
from tests.support.stores import new_store
from tests.unit.core.builders import T0, chain, make_spec, node, submission

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.advance import Effect
    from orchestrator.core.lifecycle.fold import Change
    from orchestrator.daemon.ports import GangRuntime


class SlowDisk(Store):
    """A store that delays its writes until the test releases them."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def append(self, changes: Sequence[Change], **clock: Any) -> None:
        self.asked.set()
        await self.go_on.wait()
        await super().append(changes, **clock)


class Daemon:
    """A loop on a slow disk with one queued job, and its notifications."""

    def __init__(self, runtime: Orders | None = None) -> None:
        self.store = new_store(SlowDisk)
        self.changed: list[JobState] = []
        self.ended: list[JobId] = []
        self.loop = Loop(
            store=self.store,
            runtime=lambda: cast("GangRuntime | None", runtime),
            on_change=lambda job: self.changed.append(job.state),
            on_end=lambda job: self.ended.append(job.id),
            log=structlog.get_logger(),
        )

    async def accept(self) -> Job:
        job, _ = await self.store.submit(submission(make_spec()))
        self.loop.add(job)
        return job

    def cancel(self, job_id: JobId) -> asyncio.Task[None]:
        def make() -> Sequence[Event]:
            job = self.loop.decided.get(job_id)
            return request_stop(job, StopPurpose.CANCEL, ByUser(name="ada"), time.time()) if job else []

        return asyncio.create_task(self.loop.command(make))


async def cancelled_on_a_slow_disk() -> None:
    daemon = Daemon()
    job = await daemon.accept()
    rounds = asyncio.create_task(daemon.loop.run())
    try:
        acknowledged = daemon.cancel(job.id)
        async with asyncio.timeout(300):
            await daemon.store.asked.wait()
        assert daemon.loop.decided[job.id].state is JobState.CANCELLED
        assert daemon.loop.jobs[job.id].state is JobState.PENDING  # after a power cut now, the job would be queued
        assert not acknowledged.done()
        assert set(daemon.changed) == {JobState.PENDING}
        assert daemon.ended == []
        daemon.store.go_on.set()
        async with asyncio.timeout(300):
            await acknowledged
        assert daemon.changed[-1] is JobState.CANCELLED
        assert daemon.ended == [job.id]
        assert not daemon.loop.jobs
        assert not daemon.loop.decided
        assert (await daemon.store.job(job.id)).state is JobState.CANCELLED
    finally:
        rounds.cancel()


def test_nobody_is_told_of_an_end_that_a_power_cut_would_undo() -> None:
    asyncio.run(cancelled_on_a_slow_disk())


class Orders:
    """A runtime that records the effects that it is given."""

    def __init__(self) -> None:
        self.given: list[Effect | None] = []
        self.asked = asyncio.Event()

    def apply(self, job: Job, effect: Effect | None) -> None:
        self.given.append(effect)
        self.asked.set()


async def started_on_a_slow_disk() -> None:
    orders = Orders()
    daemon = Daemon(runtime=orders)
    await daemon.accept()
    daemon.loop.set_nodes({"a": node("a")})
    rounds = asyncio.create_task(daemon.loop.run())
    try:
        async with asyncio.timeout(300):
            await daemon.store.asked.wait()
        assert orders.given == [], "a power cut now, and ranks would run that are not recorded"
        daemon.store.go_on.set()
        async with asyncio.timeout(300):
            await orders.asked.wait()
        assert [type(effect) for effect in orders.given] == [Ensure]
    finally:
        rounds.cancel()


def test_nothing_is_ordered_before_it_is_recorded() -> None:
    asyncio.run(started_on_a_slow_disk())


async def written_by_another_program() -> None:
    daemon = Daemon()
    daemon.store.go_on.set()
    job = await daemon.accept()
    other = chain(job, JobUpdated(job_id=job.id, at=T0, by="another program", priority=1))
    await daemon.store.append(other)
    rounds = asyncio.create_task(daemon.loop.run())
    waiting = daemon.cancel(job.id)
    with pytest.raises(VersionConflictError, match="another program"):
        async with asyncio.timeout(300):
            await rounds
    waiting.cancel()
    assert await daemon.store.job(job.id) == other[-1].after
    assert daemon.ended == []


def test_the_loop_stops_where_the_store_holds_another_record() -> None:
    asyncio.run(written_by_another_program())
