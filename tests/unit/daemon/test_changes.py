"""The change counter remembers a bounded number of jobs, and wakes the waiters of the others rather too often than never."""

from __future__ import annotations

import asyncio

from orchestrator.core.ids import JobId
from orchestrator.daemon.changes import Changes


def test_the_change_of_a_forgotten_job_still_wakes_its_waiter() -> None:
    async def waits(after: int, name: str) -> bool:
        """Whether a waiter would wait for a change of the job after a version."""
        found = asyncio.create_task(changes.wait(after, 1000.0, frozenset({JobId(name)})))
        await asyncio.sleep(0)
        done = found.done()
        found.cancel()
        await asyncio.gather(found, return_exceptions=True)
        return not done

    async def case() -> None:
        for name in ("a", "b", "a", "c", "d"):  # versions 1 to 5
            changes.touch(JobId(name))
        assert len(changes._by_job) == 2
        assert not await waits(2, "a"), "its change was the third"
        assert await waits(3, "a")
        assert not await waits(4, "d")
        assert await waits(5, "d")

    changes = Changes(0, remembered=2)
    asyncio.run(case())
