"""The change counter behind ``--watch``, ``--wait`` and ``--follow``: each waiter wakes only for its own jobs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from orchestrator.core.ids import JobId


REMEMBERED: Final = 10_000


class Changes:
    """Counts every change of any job; remembers the newest change of the ``remembered`` jobs that changed last."""

    def __init__(self, start: int, *, remembered: int = REMEMBERED) -> None:
        self.version = start
        self._remembered = remembered
        self._by_job: dict[JobId, int] = {}  # the oldest change first
        self._forgotten = 0  # a waiter for a forgotten job wakes for any change up to this one
        self._waiters: set[asyncio.Future[None]] = set()

    def touch(self, job_id: JobId) -> None:
        """Count a change of a job."""
        self.version += 1
        self._by_job.pop(job_id, None)
        self._by_job[job_id] = self.version
        if len(self._by_job) > self._remembered:
            self._forgotten = self._by_job.pop(next(iter(self._by_job)))
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def current(self) -> int:
        """Return the counter."""
        return self.version

    async def wait(self, after: int, timeout_seconds: float, job_ids: frozenset[JobId] = frozenset()) -> int:
        """Return the counter after a change of one of ``job_ids`` (empty: of any job), or at the timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while after <= self.version and self._newest(job_ids) <= after:
            left = deadline - loop.time()
            if left <= 0:
                break
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=left)
            finally:
                self._waiters.discard(waiter)
        return self.version

    def _newest(self, job_ids: frozenset[JobId]) -> int:
        if not job_ids:
            return self.version
        return max((self._by_job.get(job_id, self._forgotten) for job_id in job_ids), default=0)
