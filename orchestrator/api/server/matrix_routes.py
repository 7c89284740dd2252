"""Routes of matrices and of actions on jobs; an action on a matrix applies to its jobs together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request  # noqa: TC002  # FastAPI reads the annotations when it runs

from orchestrator.api.errors import BadRequestError, NotFoundError, NotPermittedError
from orchestrator.api.matrix_views import MatrixView
from orchestrator.api.protocol import API_PREFIX
from orchestrator.api.server.audit import audited
from orchestrator.api.server.bodies import ActionBody  # noqa: TC001  # FastAPI reads the annotations when it runs
from orchestrator.api.server.ownership import Ref, caller_of, check_own
from orchestrator.api.service import Verb  # noqa: TC001
from orchestrator.api.views import ActionReply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastapi import FastAPI
    from fastapi.responses import Response

    from orchestrator.api.service import Caller, JobService
    from orchestrator.api.view import View
    from orchestrator.core.ids import JobId


def add_matrix_routes(
    app: FastAPI,
    service: JobService,
    own_job: Callable[[JobService, str, Request, str], Awaitable[tuple[JobId, Caller]]],
    answer: Callable[[View], Response],
) -> None:
    """Add the routes; ``own_job`` returns the job's id if the caller may act on the job, else it raises."""

    @app.get(f"{API_PREFIX}/matrices/{{ref}}", response_model=MatrixView)
    async def matrix(ref: Ref, request: Request) -> Response:
        """Return a matrix, with the state of each of its jobs."""
        found = await service.find_matrix(ref, caller_of(request))
        if found is None:
            raise NotFoundError(f"there is no matrix {ref!r}", hint="`orch matrix` lists the matrices")
        return answer(await service.matrix(found))

    @app.post(f"{API_PREFIX}/jobs/{{ref}}/{{verb}}", response_model=ActionReply)
    async def act(ref: Ref, verb: Verb, body: ActionBody, request: Request) -> Response:
        """Cancel, pause, resume, hold, release, rerun or update a job of the caller, or a matrix."""
        details = body.request(verb)
        found = await service.find_matrix(ref, caller_of(request))
        if found is None:
            job_id, caller = await own_job(service, ref, request, verb)
            if details.force and not caller.is_owner:
                raise NotPermittedError(
                    f"only the daemon's owner may cancel by force; you are {caller.user}",
                    hint=f"`orch cancel {job_id}` gives it time to save; ask the owner where that does not end it",
                )
            reply = await service.act(job_id, details, caller)
            record = audited(request)
            said = f"{reply.job_id} {reply.message}" if reply.job_id != job_id else reply.message
            record.detail = f"by force: {said}" if details.force else said
            return answer(reply)
        audited(request).job = found
        if details.force:
            raise BadRequestError(
                f"{found} is a matrix", hint="name the job that does not end: `orch cancel --force JOB`"
            )
        caller, whole = caller_of(request), await service.matrix(found)
        check_own(caller, verb, found, whole.user, whole.uid)
        return answer(await service.act_on_matrix(found, details, caller))
