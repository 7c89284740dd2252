"""Handles jobs in interactive use: interactive ones, which are cancelled when idle, and those at a breakpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.facts.requesters import ByLimit
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.states import StopPurpose

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
    from typing import Any

    from orchestrator.core import events as ev
    from orchestrator.core.diagnosis.observation import TerminalSeen
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job

IDLE_LIMIT = "interactive.idle_limit"


class Attendance:
    """Jobs in interactive use. ``jobs`` returns live jobs, ``terminals`` a job's terminals; ``spawn`` starts a task."""

    def __init__(
        self,
        *,
        jobs: Callable[[], Iterable[Job]],
        terminals: Callable[[Job], Mapping[int, TerminalSeen]],
        command: Callable[[Callable[[], Sequence[ev.Event]]], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        now: Callable[[], float],
    ) -> None:
        self._jobs, self._terminals, self._command, self._spawn, self._now = jobs, terminals, command, spawn, now
        self._ending: set[JobId] = set()

    def attend(self, job: Job) -> bool:
        """Return whether a running job is in interactive use, and so not late; cancel an idle interactive one."""
        terminals = self._terminals(job)
        if job.spec.interactive is None:
            return any(one.stopped_at is not None for one in terminals.values())
        idle = len(terminals) == job.num_workers and all(one.idle for one in terminals.values())
        if idle and job.id not in self._ending:
            self._ending.add(job.id)
            self._spawn(self._cancel(job.id))
        return True

    async def _cancel(self, job_id: JobId) -> None:
        def make() -> Sequence[ev.Event]:
            job = next((one for one in self._jobs() if one.id == job_id), None)
            return [] if job is None else request_stop(job, StopPurpose.CANCEL, ByLimit(key=IDLE_LIMIT), self._now())

        try:
            await self._command(make)
        finally:
            self._ending.discard(job_id)
