"""References to jobs in paths, and the check that a caller may act on a job: its user or the daemon's owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Path

from orchestrator.api.errors import NotPermittedError

if TYPE_CHECKING:
    from orchestrator.api.service import Caller, JobService
    from orchestrator.api.views import JobView


REF_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""No slash or leading dot: a reference never becomes a path."""

Ref = Annotated[
    str, Path(pattern=REF_PATTERN, description="A job's id, a unique prefix of one, or a name (its newest)")
]


async def own_job_view(service: JobService, ref: str, caller: Caller, verb: str) -> JobView:
    """Return the job. Raises NotPermittedError if it is another user's and ``caller`` is not the daemon's owner."""
    job = await service.job(await service.resolve(ref))
    if not caller.is_owner and job.uid != caller.uid:
        raise NotPermittedError(
            f"job {job.id} belongs to {job.user}; {caller.user} may not {verb} it", hint=f"ask {job.user}"
        )
    return job
