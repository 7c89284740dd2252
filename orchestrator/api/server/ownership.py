"""References to jobs in paths, and the check that a caller may act on a job: its user or the daemon's owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Path
from pydantic import AfterValidator

from orchestrator.api.errors import NotPermittedError
from orchestrator.api.protocol import REFERENCE_SEPARATOR
from orchestrator.api.service import Caller
from orchestrator.spec.fields import USER_PATTERN

if TYPE_CHECKING:
    from fastapi import Request

    from orchestrator.api.service import JobService
    from orchestrator.api.views import JobView


ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""No slash or leading dot: a reference never becomes a path."""

REF_PATTERN = rf"^(?:{USER_PATTERN}{REFERENCE_SEPARATOR})?{ID_PATTERN[1:]}"


def from_path(ref: str) -> str:
    """Return the reference that a part of a path is: a path's ``user:name`` is ``user/name``."""
    return ref.replace(REFERENCE_SEPARATOR, "/")


Ref = Annotated[
    str,
    Path(
        pattern=REF_PATTERN,
        description="A job's id, a unique prefix of one, a name (the caller's newest), or USER:NAME (that user's newest)",
    ),
    AfterValidator(from_path),
]


def caller_of(request: Request) -> Caller:
    """Return the caller that the gate authenticated. Raises NotPermittedError if there is none."""
    caller = getattr(request.state, "caller", None)
    if not isinstance(caller, Caller):
        raise NotPermittedError("the caller is not authenticated")
    return caller


async def own_job_view(service: JobService, ref: str, caller: Caller, verb: str) -> JobView:
    """Return the job. Raises NotPermittedError if it is another user's and ``caller`` is not the daemon's owner."""
    job = await service.job(await service.resolve(ref, caller))
    check_own(caller, verb, job.id, job.user, job.uid)
    return job


def check_own(caller: Caller, verb: str, job_id: str, user: str, uid: int) -> None:
    """Raise NotPermittedError if the job or matrix is another user's and ``caller`` is not the daemon's owner."""
    if not caller.is_owner and uid != caller.uid:
        raise NotPermittedError(f"{job_id} belongs to {user}; {caller.user} may not {verb} it", hint=f"ask {user}")
