"""A gang is removed once its keepers have confirmed its end; what goes wrong with its outputs is a note."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.job.record import Job
from orchestrator.runtime.gangs.ending import Ender
from orchestrator.runtime.gangs.table import Gang
from tests.unit.core.builders import T0, after, make_spec, pending, running

RUNNING = running(pending(make_spec(workers=1)))
SUCCEEDED = after(RUNNING, ev.AttemptSucceeded(job_id=RUNNING.id, at=T0 + 11, attempt=1))


class Scene:
    """A gang of one rank, and the calls about it, in order."""

    def __init__(
        self, job: Job, finish: Callable[[], Awaitable[str]] | None = None, *, collect_seconds: float = 600.0
    ) -> None:
        self._finish = finish
        self.notes: list[str] = []
        self.done: list[str] = []
        self.job = job
        self.gang = Gang(number=job.gang, actors=[SimpleNamespace(flush=self._flushed)])
        self.confirmed = asyncio.Event()
        self.gang.watchers = [asyncio.create_task(self._watch())]
        table: Any = SimpleNamespace(
            known=lambda _id: self.gang,
            attach=self._attached,
            remove=self._remove,
            drop=lambda _id: None,
        )
        files: Any = SimpleNamespace(finish=self._finished, apart=lambda _job: ["far"] if self._finish else [])
        nodes: Any = SimpleNamespace(agent_for=lambda _node: None, until_fenced=self._fenced)
        no: Any = None
        self.ender = Ender(
            table,
            no,
            no,
            nodes,
            files,
            until_connected=self._connected,
            post=self._post,
            collect_seconds=collect_seconds,
        )

    async def _watch(self) -> None:
        await self.confirmed.wait()
        self.gang.gone.add(0)

    async def _flushed(self, _seconds: float) -> None:
        return None

    async def _attached(self, _job: Job) -> Gang:
        return self.gang

    async def _remove(self, _job: Job) -> None:
        self.done.append("removed")

    async def _finished(self, _job: Job) -> str:
        return await self._finish() if self._finish else ""

    async def _fenced(self, _node: str) -> None:
        self.done.append("waited for the node")

    async def _connected(self) -> None:
        return None

    def _post(self, events: list[ev.Event]) -> None:
        self.done += [event.kind for event in events]
        self.notes += [event.note.said for event in events if isinstance(event, ev.JobNoted)]  # type: ignore[attr-defined]


def test_a_gang_that_ended_well_is_removed_when_its_end_is_confirmed() -> None:
    async def run() -> list[str]:
        assert SUCCEEDED.succeeded
        scene = Scene(SUCCEEDED)
        release = asyncio.create_task(scene.ender.release(SUCCEEDED))
        for _ in range(50):  # turns of the event loop, in which a release that does not wait would have ended
            await asyncio.sleep(0)
        assert not release.done()
        scene.confirmed.set()
        await release
        return scene.done

    assert asyncio.run(run()) == ["removed", "gang_released"]


def test_a_gang_that_did_not_end_well_is_removed_at_once() -> None:
    async def run() -> list[str]:
        scene = Scene(RUNNING)
        await scene.ender.release(RUNNING)
        for task in scene.gang.watchers:
            task.cancel()
        return scene.done

    assert asyncio.run(run())[0] == "removed"


async def _hang() -> str:
    await asyncio.Event().wait()
    return ""


async def _recurse() -> str:
    raise RecursionError("maximum recursion depth exceeded")


@pytest.mark.parametrize(
    ("finish", "collect_seconds", "said"),
    [
        (_recurse, 600.0, "logs and outputs could not be copied (RecursionError: maximum recursion depth exceeded)"),
        (_hang, 0.01, "copying logs and outputs took more than 0 minutes"),
    ],
)
def test_whatever_goes_wrong_with_the_outputs_is_a_note_and_the_gang_is_released_before(
    finish: Callable[[], Awaitable[str]], collect_seconds: float, said: str
) -> None:
    async def run() -> Scene:
        scene = Scene(RUNNING, finish, collect_seconds=collect_seconds)
        await scene.ender.release(RUNNING)
        assert scene.done[-1] == "gang_released"
        await scene.ender.collect(RUNNING)
        assert not scene.ender.end_collection(RUNNING.id)
        return scene

    scene = asyncio.run(run())
    assert scene.done[-2:] == ["job_noted", "files_collected"]
    assert scene.notes[0].startswith(said)


def test_a_cancel_ends_the_copying_of_outputs() -> None:
    async def run() -> Scene:
        begun = asyncio.Event()

        async def hang() -> str:
            begun.set()
            return await _hang()

        scene = Scene(RUNNING, hang)
        assert not scene.ender.end_collection(RUNNING.id)
        collection = asyncio.create_task(scene.ender.collect(RUNNING))
        await begun.wait()
        assert scene.ender.end_collection(RUNNING.id)
        await collection
        return scene

    scene = asyncio.run(run())
    assert scene.done[-2:] == ["job_noted", "files_collected"]
    assert scene.notes[0].startswith("copying logs and outputs was ended by orch cancel")
