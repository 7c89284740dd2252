"""Stops the daemon: the request, its answer, and the end of the jobs' gangs where requested."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from orchestrator.api import views as v
from orchestrator.api.errors import DaemonStoppingError
from orchestrator.core.facts.reasons import ByShutdown
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.states import StopPurpose

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.api.service import Caller
    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.daemon.changes import Changes
    from orchestrator.daemon.loop import Loop

DRAIN_WAIT_SECONDS: Final = 1.0
ANSWER_FIRST_SECONDS: Final = 0.05


class StopRequest:
    """Request to stop the daemon; with ``stop_jobs``, its jobs return to the queue first."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self.stop_jobs = False

    @property
    def requested(self) -> bool:
        """Whether the daemon is stopping."""
        return self._requested.is_set()

    @property
    def drains(self) -> bool:
        """Whether jobs return to the queue: nothing is placed any more."""
        return self.stop_jobs and self.requested

    def now(self) -> None:
        """Request the stop."""
        self._requested.set()

    async def wait(self) -> None:
        """Wait until a stop is requested."""
        await self._requested.wait()

    def refuse(self) -> None:
        """Raise DaemonStoppingError once the daemon is stopping."""
        if self.requested:
            raise DaemonStoppingError("the daemon is shutting down")


class Shutdown:
    """Answers a request to stop and makes running jobs save first. ``failed`` returns whether the daemon ends by an error."""

    def __init__(
        self, stop: StopRequest, loop: Loop, changes: Changes, failed: Callable[[], bool], log: FilteringBoundLogger
    ) -> None:
        self._stop = stop
        self._loop = loop
        self._changes = changes
        self._failed = failed
        self._log = log
        self._begun = False

    def holding(self) -> tuple[JobId, ...]:
        """Return the jobs that have a gang, or files of one that are being collected."""
        return tuple(j.id for j in self._loop.decided.active.values() if j.file_nodes)

    def begin(self, *, stop_jobs: bool, caller: Caller) -> v.ShutdownReply:
        """Answer what will happen, then stop. A second request changes nothing."""
        if self._begun or self._stop.requested:
            stop_jobs = self._stop.stop_jobs
        self._begun = True
        holding = self.holding()
        self._log.info("daemon.stopping", by=caller.user, stop_jobs=stop_jobs, jobs=len(holding))
        self._stop.stop_jobs = stop_jobs
        asyncio.get_running_loop().call_later(ANSWER_FIRST_SECONDS, self._stop.now)
        return v.ShutdownReply(running=() if stop_jobs else holding, stopped=holding if stop_jobs else ())

    async def drain(self) -> None:
        """Make every running job save and return to the queue; nothing new is placed meanwhile."""
        self._loop.set_nodes({})
        for job_id in self.holding():
            await self._loop.command(lambda job_id=job_id: self._preempt(job_id))  # type: ignore[misc]  # mypy cannot infer a default's type
        version = self._changes.version
        while self.holding() and not self._failed():
            version = await self._changes.wait(version, DRAIN_WAIT_SECONDS, frozenset())

    def _preempt(self, job_id: JobId) -> Sequence[Event]:
        job = self._loop.decided.get(job_id)
        return request_stop(job, StopPurpose.PREEMPT, ByShutdown(), self._loop.now()) if job else []
