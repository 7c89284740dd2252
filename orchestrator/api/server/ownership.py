"""Who may act on a job: its user, and the daemon's owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.api.errors import NotPermittedError

if TYPE_CHECKING:
    from orchestrator.api.service import Caller, JobService
    from orchestrator.api.views import JobView


async def own_job_view(service: JobService, ref: str, caller: Caller, verb: str) -> JobView:
    """The job. Raises NotPermittedError where it is another user's, and ``caller`` not the daemon's owner."""
    job = await service.job(await service.resolve(ref))
    if not caller.is_owner and job.uid != caller.uid:
        raise NotPermittedError(
            f"job {job.id} belongs to {job.user}; {caller.user} may not {verb} it", hint=f"ask {job.user}"
        )
    return job
