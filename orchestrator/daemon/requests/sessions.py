"""Opens sessions beside ranks: commands and connections to ports. The application decides about permission."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from orchestrator.api.errors import BadRequestError, RefusedError
from orchestrator.core.states import JobState
from orchestrator.runtime.ranks.sessions.messages import PortRequest, SessionRefusedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from structlog.typing import FilteringBoundLogger

    from orchestrator.api.service import Caller, SessionChannel
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.rank_rpc import GangSession
    from orchestrator.runtime.ranks.sessions.messages import SessionMessage, SessionOutput, SessionRequest


Result = TypeVar("Result")


class SessionRanks(Protocol):
    """Opens sessions beside a running gang's ranks."""

    async def open_session(self, job: Job, rank: int, request: SessionRequest) -> GangSession:
        """Open a command or a connection beside a rank. Raises SessionRefusedError."""
        ...


class JobSessions:
    """Opens sessions. ``record`` returns a job's record by its id, and raises NoSuchJobError."""

    def __init__(
        self, record: Callable[[JobId], Awaitable[Job]], ranks: SessionRanks, log: FilteringBoundLogger
    ) -> None:
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


class SessionService:
    """The part of ``api.service.JobService`` about sessions; the class that includes it sets ``_sessions``."""

    _sessions: JobSessions

    async def open_session(self, job_id: JobId, rank: int, request: SessionRequest, caller: Caller) -> SessionChannel:
        """Open a command, or a connection to a port, beside a rank of a running job."""
        return await self._sessions.open(job_id, rank, request, caller)


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
