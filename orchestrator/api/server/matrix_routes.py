"""Routes of matrices and of actions on jobs; an action on a matrix applies to its jobs together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Path, Request

from orchestrator.api.errors import NotFoundError, NotPermittedError
from orchestrator.api.matrix_views import MatrixView
from orchestrator.api.protocol import API_PREFIX
from orchestrator.api.server.bodies import ActionBody  # noqa: TC001  # FastAPI reads the annotations when it runs
from orchestrator.api.server.ownership import REF_PATTERN
from orchestrator.api.service import Verb  # noqa: TC001
from orchestrator.api.views import ActionReply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastapi import FastAPI
    from fastapi.responses import Response

    from orchestrator.api.service import Caller, JobService
    from orchestrator.api.view import View
    from orchestrator.core.ids import JobId

JobOrMatrix = Annotated[
    str,
    Path(pattern=REF_PATTERN, description="A job's or a matrix's id, a unique prefix of one, or a name (its newest)"),
]


def add_matrix_routes(
    app: FastAPI,
    service: JobService,
    own_job: Callable[[JobService, str, Request, str], Awaitable[tuple[JobId, Caller]]],
    caller_of: Callable[[Request], Caller],
    answer: Callable[[View], Response],
) -> None:
    """Add the routes; ``own_job`` returns the job's id if the caller may act on the job, else it raises."""

    @app.get(f"{API_PREFIX}/matrices/{{ref}}", response_model=MatrixView)
    async def matrix(ref: JobOrMatrix) -> Response:
        """Return a matrix, with the state of each of its jobs."""
        found = await service.find_matrix(ref)
        if found is None:
            raise NotFoundError(f"there is no matrix {ref!r}", hint="`orch matrix` lists the matrices")
        return answer(await service.matrix(found))

    @app.post(f"{API_PREFIX}/jobs/{{ref}}/{{verb}}", response_model=ActionReply)
    async def act(ref: JobOrMatrix, verb: Verb, body: ActionBody, request: Request) -> Response:
        """Cancel, pause, resume, hold, release, rerun or update a job of the caller, or a matrix."""
        details = body.request(verb)
        found = await service.find_matrix(ref)
        if found is None:
            job_id, caller = await own_job(service, ref, request, verb)
            return answer(await service.act(job_id, details, caller))
        caller, whole = caller_of(request), await service.matrix(found)
        if not caller.is_owner and whole.uid != caller.uid:
            raise NotPermittedError(
                f"{found} belongs to {whole.user}; {caller.user} may not {verb} it", hint=f"ask {whole.user}"
            )
        return answer(await service.act_on_matrix(found, details, caller))
