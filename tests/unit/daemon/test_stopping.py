"""The shutdown of the daemon."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.api.errors import DaemonStoppingError
from orchestrator.core.scheduler.live_jobs import LiveJobs
from orchestrator.daemon.changes import Changes
from orchestrator.daemon.stopping import Shutdown, StopRequest
from tests.unit.core.builders import running
from tests.unit.daemon.parts import ADA, LOG, Rounds


def test_nothing_is_taken_after_the_request() -> None:
    stop = StopRequest()
    stop.refuse()
    stop.stop_jobs = True
    assert not stop.drains
    stop.now()
    assert stop.drains
    with pytest.raises(DaemonStoppingError):
        stop.refuse()


def test_the_answer_names_jobs_with_a_gang_and_the_stop_follows() -> None:
    async def run() -> None:
        rounds, stop = Rounds(), StopRequest()
        job = running()
        rounds.loop.decided = LiveJobs([job])
        leaving = Shutdown(StopRequest(), rounds.loop, Changes(0), lambda: False, LOG)
        assert leaving.begin(stop_jobs=False, caller=ADA).running == (job.id,)
        reply = Shutdown(stop, rounds.loop, Changes(0), lambda: False, LOG).begin(stop_jobs=True, caller=ADA)
        assert (reply.running, reply.stopped) == ((), (job.id,))
        async with asyncio.timeout(300):
            await stop.wait()
        assert stop.drains

    asyncio.run(run())


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_second_request_changes_nothing_about_the_first(*, first: bool, at_once: bool) -> None:
    """A plain `down` after `down --stop-jobs` would place the jobs again that are on their way to the queue."""

    async def run() -> None:
        rounds, stop = Rounds(), StopRequest()
        job = running()
        rounds.loop.decided = LiveJobs([job])
        shutdown = Shutdown(stop, rounds.loop, Changes(0), lambda: False, LOG)
        told = shutdown.begin(stop_jobs=first, caller=ADA)
        async with asyncio.timeout(300):
            if not at_once:
                await stop.wait()
            assert shutdown.begin(stop_jobs=not first, caller=ADA) == told
            await stop.wait()
        assert stop.drains is first

    asyncio.run(run())


def test_a_request_after_sigterm_leaves_jobs_running() -> None:
    async def run() -> None:
        rounds, stop = Rounds(), StopRequest()
        job = running()
        rounds.loop.decided = LiveJobs([job])
        stop.now()
        shutdown = Shutdown(stop, rounds.loop, Changes(0), lambda: False, LOG)
        assert shutdown.begin(stop_jobs=True, caller=ADA).running == (job.id,)
        assert not stop.drains

    asyncio.run(run())


def test_draining_ends_when_the_daemon_dies_of_a_fault() -> None:
    async def run() -> None:
        async with Rounds() as rounds:
            job = running()
            rounds.loop.decided = LiveJobs([job])
            shutdown = Shutdown(StopRequest(), rounds.loop, Changes(0), lambda: True, LOG)
            rounds.loop.command = answered  # type: ignore[method-assign]
            async with asyncio.timeout(300):
                await shutdown.drain()
            assert shutdown.holding() == (job.id,)

    asyncio.run(run())


async def answered(_make: object) -> None:
    """Complete at once, as a command that is durable."""
