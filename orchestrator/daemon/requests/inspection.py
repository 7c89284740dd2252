"""Inspects the ranks of running jobs for users: traces and stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from orchestrator.api import views as v
from orchestrator.api.errors import BadRequestError, RefusedError
from orchestrator.core.states import JobState
from orchestrator.daemon.jobs.views import rank_stacks
from orchestrator.runtime.ranks.evidence.process_inspector import report_lines
from orchestrator.train.script.trace_request import TraceRefusedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from orchestrator.api.service import ProfileRequest
    from orchestrator.core.diagnosis.health import RankLook
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job


class Ranks(Protocol):
    """Requests to a running gang's ranks."""

    async def trace(self, job: Job, rank: int, steps: int, seconds: float) -> bytes:
        """Return a trace of a rank's next steps. Raises TraceRefusedError."""
        ...

    async def look(self, job: Job, *, stacks: bool, ranks: Sequence[int] | None = None) -> dict[int, RankLook]:
        """Inspect each rank that answers."""
        ...

    async def note(self, job: Job, lines: Mapping[int, Sequence[str]]) -> None:
        """Write lines to the ranks' logs."""
        ...


class RankInspection:
    """Inspects ranks. ``record`` returns a job's record by its id, and raises NoSuchJobError."""

    def __init__(self, record: Callable[[JobId], Awaitable[Job]], ranks: Ranks) -> None:
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


class InspectionService:
    """The part of the service that inspects running ranks."""

    def __init__(self, inspection: RankInspection) -> None:
        self._inspection = inspection

    async def profile(self, job_id: JobId, request: ProfileRequest) -> bytes:
        """Return a torch.profiler trace of a running job's next steps."""
        return await self._inspection.profile(job_id, request)

    async def stacks(self, job_id: JobId, rank: int | None) -> v.StacksView:
        """Return the stacks of a running job's ranks."""
        return await self._inspection.stacks(job_id, rank)
