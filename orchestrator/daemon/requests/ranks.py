"""Inspects the ranks of running jobs for users (traces, stacks) and opens sessions beside them. The application decides about permission."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from orchestrator.api import views as v
from orchestrator.api.errors import BadRequestError, RefusedError
from orchestrator.core.states import JobState
from orchestrator.daemon.jobs.views import rank_stacks
from orchestrator.runtime.ranks.process_inspector import report_lines
from orchestrator.runtime.ranks.session_messages import PortRequest, SessionRefusedError
from orchestrator.train.script.profiling import TraceRefusedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from structlog.typing import FilteringBoundLogger

    from orchestrator.api.requests import ProfileRequest
    from orchestrator.api.service import Caller, SessionChannel
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.rank_rpc import GangCalls, GangSession
    from orchestrator.runtime.ranks.session_messages import SessionMessage, SessionOutput, SessionRequest


class RankInspection:
    """Inspects ranks. ``record`` returns a job's record by its id, and raises NoSuchJobError."""

    def __init__(self, record: Callable[[JobId], Awaitable[Job]], ranks: GangCalls) -> None:
        self._record = record
        self._ranks = ranks

    async def profile(self, job_id: JobId, request: ProfileRequest) -> bytes:
        """Return a torch.profiler trace of a running job's next steps."""
        job = await self._running(job_id, "can be traced", request.rank)
        try:
            return await self._ranks.trace(job, request.rank, request.steps, request.timeout_seconds)
        except TraceRefusedError as error:
            message, _, hint = str(error).partition(": ")
            raise RefusedError(message, hint=hint) from error

    async def stacks(self, job_id: JobId, rank: int | None) -> v.StacksView:
        """Return the stacks of a running job's ranks."""
        job = await self._running(job_id, "has stacks", rank)
        ranks = tuple(range(job.num_workers)) if rank is None else (rank,)
        looks = await self._ranks.look(job, stacks=True, ranks=ranks)
        await self._ranks.note(job, {number: report_lines(look) for number, look in looks.items()})
        return v.StacksView(job_id=job.id, ranks=tuple(rank_stacks(number, looks.get(number)) for number in ranks))

    async def _running(self, job_id: JobId, what: str, rank: int | None) -> Job:
        job = await self._record(job_id)
        if job.state is not JobState.RUNNING:
            raise RefusedError(f"{job.id} is {job.state.value}; only a running job {what}")
        if rank is not None and rank >= job.num_workers:
            raise BadRequestError(f"{job.id} has no rank {rank}", hint=f"0 to {job.num_workers - 1}")
        return job


Result = TypeVar("Result")


class JobSessions:
    """Opens sessions. ``record`` returns a job's record by its id, and raises NoSuchJobError."""

    def __init__(self, record: Callable[[JobId], Awaitable[Job]], ranks: GangCalls, log: FilteringBoundLogger) -> None:
        self._record, self._ranks, self._log = record, ranks, log

    async def open(self, job_id: JobId, rank: int, request: SessionRequest, caller: Caller) -> SessionChannel:
        """Open a session beside a running job's rank. Raises RefusedError, BadRequestError."""
        job = await self._record(job_id)
        if job.state is not JobState.RUNNING:
            raise RefusedError(
                f"{job.id} is {job.state.value}; only a running job has ranks to enter",
                hint="`orch status` shows its state",
            )
        if rank >= job.num_workers:
            hint = f"0 to {job.num_workers - 1}" if job.num_workers > 1 else "it has rank 0 alone"
            raise BadRequestError(f"{job.id} has no rank {rank}", hint=hint)
        kind = f"port {request.port}" if isinstance(request, PortRequest) else type(request).__name__
        try:
            session = await self._ranks.open_session(job, rank, request)
        except SessionRefusedError as error:
            raise RefusedError(error.what, hint=error.remedy) from error
        self._log.info("session.opened", job=job.id, rank=rank, kind=kind, user=caller.user, channel=caller.channel)
        return _Channel(session)


class _Channel:
    """Implements ``api.service.SessionChannel``: errors of the runtime become those of the API."""

    def __init__(self, session: GangSession) -> None:
        self._session = session

    async def read(self, seconds: float) -> SessionOutput:
        """Return the output; wait for some for at most ``seconds``."""
        return await _refusing(self._session.read(seconds))

    async def send(self, message: SessionMessage) -> None:
        """Send a client's message."""
        await _refusing(self._session.send(message))

    async def close(self) -> None:
        """End the session."""
        await self._session.close()


async def _refusing(call: Awaitable[Result]) -> Result:
    try:
        return await call
    except SessionRefusedError as error:
        raise RefusedError(error.what, hint=error.remedy) from error
