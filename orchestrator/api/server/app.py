"""The control application: routes under /api/v1, each a few lines between the gate and the service.

A route parses, calls the service, renders. Only the routes check permissions: every caller that passes the gate may
read; a job's owner and the daemon's owner may act on a job; only the latter may change nodes, prune and shut down.
Long polls and followed logs end when ``closing`` is set, so that the daemon can stop at once.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

from orchestrator import __version__
from orchestrator.api.errors import (
    PROBLEM_CONTENT_TYPE,
    BadRequestError,
    DaemonStoppingError,
    InternalError,
    MethodNotAllowedError,
    NotFoundError,
    NotPermittedError,
    OrchError,
    RefusedError,
)
from orchestrator.api.page_links import PageLinkView
from orchestrator.api.protocol import API_PREFIX, MAX_NUMBER, MAX_PAGE, MAX_SEQUENCE, MAX_WAIT_SECONDS, PAGE
from orchestrator.api.server.audit import audited
from orchestrator.api.server.bodies import (
    EmptyBody,
    ProblemDocument,
    ProfileBody,
    PruneBody,
    ShutdownBody,
    StacksBody,
    SubmissionsBody,
    SubmitBody,
    bad_request,
)
from orchestrator.api.server.file_routes import add_file_routes, add_upload_routes
from orchestrator.api.server.gate import FAILED, STOPPING, Gate, GatePolicy
from orchestrator.api.server.matrix_routes import add_matrix_routes
from orchestrator.api.server.ownership import ID_PATTERN, Ref, caller_of, own_job_view
from orchestrator.api.server.queue_routes import NodeRef, add_node_routes, add_queue_routes
from orchestrator.api.server.session_routes import add_session_routes
from orchestrator.api.server.streams import log_stream, until_closing
from orchestrator.api.server.usage_routes import LATEST, add_usage_routes
from orchestrator.api.service import Caller, JobFilter, JobService, LogQuery, NodeVerb
from orchestrator.api.spec_views import SpecDiff, SpecView
from orchestrator.api.views import (
    AuditList,
    ChangeReply,
    CheckpointList,
    EventList,
    GpuList,
    HealthView,
    JobList,
    JobView,
    NodeActionReply,
    NodeList,
    PlanReply,
    PruneReply,
    ShutdownReply,
    StacksView,
    SubmitOutcome,
    SubmitOutcomes,
    SubmitReply,
    View,
)
from orchestrator.core.ids import JobId
from orchestrator.core.states import JobState
from orchestrator.store.errors import StoreClosedError

if TYPE_CHECKING:
    from orchestrator.api.page_links import PageLinks
    from orchestrator.api.server.audit import AuditLog


PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "A problem document", "content": ProblemDocument.media_schema()}
}


def create_control_app(
    service: JobService,
    policy: GatePolicy,
    closing: asyncio.Event,
    links: PageLinks | None = None,
    audit: AuditLog | None = None,
) -> Gate:
    """Return the control application behind its gate; ``control_routes`` makes the FastAPI object."""
    return Gate(control_routes(service, closing, links, audit), policy, audit)


def control_routes(
    service: JobService, closing: asyncio.Event, links: PageLinks | None = None, audit: AuditLog | None = None
) -> FastAPI:
    """Return the routes without the gate. Serve them only behind one: they trust ``request.state.caller``.

    ``links`` is None where the daemon serves no page, ``audit`` where it keeps no audit log.
    """
    app = FastAPI(
        title="orch",
        version=__version__,
        summary="Runs training jobs on the GPUs of one machine or of a Ray cluster.",
        openapi_url=f"{API_PREFIX}/openapi.json",
        docs_url=None,  # the interactive pages load scripts from another site
        redoc_url=None,
        redirect_slashes=False,
        responses=PROBLEMS,
    )
    _add_error_handlers(app)
    _add_reading_routes(app, service)
    _add_waiting_routes(app, service, closing)
    _add_submission_routes(app, service, closing)
    _add_looking_routes(app, service, closing)
    add_file_routes(app, service, answer)
    add_session_routes(app, service, closing)
    add_upload_routes(app, service, answer)
    add_matrix_routes(app, service, _own_job, answer)
    _add_daemon_routes(app, service, audit)
    add_queue_routes(app, service, _owner_of_daemon, answer)
    add_node_routes(app, service, _owner_of_daemon, answer)
    add_usage_routes(app, service, answer)
    _add_page_routes(app, links)
    _document_problems(app)
    return app


def answer(view: View, status: int = 200) -> Response:
    """Return the view as JSON; views are checked by their types, so Pydantic does not check them a second time."""
    body = json.dumps(view.to_json(), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )
    return Response(body, status_code=status, media_type="application/json")


def _owner_of_daemon(request: Request, what: str) -> Caller:
    caller = caller_of(request)
    if not caller.is_owner:
        raise NotPermittedError(f"only the daemon's owner may {what}; you are {caller.user}", hint="ask its owner")
    return caller


async def _own_job(service: JobService, ref: str, request: Request, verb: str) -> tuple[JobId, Caller]:
    caller = caller_of(request)
    audited(request).job = await service.resolve(ref, caller)
    return await own_job(service, ref, caller, verb), caller


async def own_job(service: JobService, ref: str, caller: Caller, verb: str) -> JobId:
    """Return the job's id. Raises NotPermittedError for another user's job unless the caller is the daemon's owner."""
    return JobId((await own_job_view(service, ref, caller, verb)).id)


def _add_error_handlers(app: FastAPI) -> None:
    def problem(request: Request, error: OrchError) -> Response:
        audited(request).result = error.code
        return Response(json.dumps(error.to_json()), status_code=error.http_status, media_type=PROBLEM_CONTENT_TYPE)

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, OrchError)
        return problem(request, error)

    async def stopping(request: Request, __: Exception) -> Response:
        return problem(request, DaemonStoppingError(STOPPING))

    async def internal(request: Request, __: Exception) -> Response:
        return problem(request, InternalError(FAILED))  # Starlette raises it again for the gate, which logs it

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem(request, bad_request(list(error.errors())))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return problem(request, MethodNotAllowedError(f"{request.method} is not a method of {request.url.path}"))
        if error.status_code == 404:
            return problem(
                request, NotFoundError(f"there is no page {request.url.path}", hint=f"see {API_PREFIX}/openapi.json")
            )
        return problem(request, BadRequestError(str(error.detail), hint=f"see {API_PREFIX}/openapi.json"))

    app.add_exception_handler(OrchError, ours)
    app.add_exception_handler(StoreClosedError, stopping)
    app.add_exception_handler(Exception, internal)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _document_problems(app: FastAPI) -> None:
    """Put the problem document's schema, which no route returns by type, into the OpenAPI document."""
    plain = app.openapi

    def with_problems() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain()
            schema = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(schema.pop("$defs", {}))
            schemas["ProblemDocument"] = schema
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = with_problems  # type: ignore[method-assign]  # FastAPI's documented way


def _states(names: list[str]) -> frozenset[str]:
    known = {state.value for state in JobState}
    unknown = [name for name in names if name.upper() not in known]
    if unknown:
        raise BadRequestError(f"unknown job state {unknown[0]!r}", hint=f"one of {', '.join(sorted(known))}")
    return frozenset(name.upper() for name in names)


def _add_reading_routes(app: FastAPI, service: JobService) -> None:
    @app.get(f"{API_PREFIX}/health", response_model=HealthView)
    async def health() -> Response:
        """Return the daemon's own state."""
        return answer(await service.health())

    @app.get(f"{API_PREFIX}/jobs", response_model=JobList)
    async def jobs(
        request: Request,
        user: Annotated[str | None, Query(max_length=256)] = None,
        state: Annotated[list[str] | None, Query(max_length=16)] = None,
        since: Annotated[float | None, Query(allow_inf_nan=False)] = None,
        before: Annotated[str | None, Query(max_length=256)] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
    ) -> Response:
        """Return jobs, newest first; `before`, the id of a job, continues after it."""
        version = service.change_version()  # before the jobs: a change in between is then reported again, not lost
        earlier = None if before is None else await service.resolve(before, caller_of(request))
        query = JobFilter(user=user, states=_states(state or []), since=since, before=earlier, limit=limit)
        found = tuple(await service.jobs(query))
        return answer(JobList(version=version, jobs=found, more=len(found) == limit))

    @app.get(f"{API_PREFIX}/jobs/{{ref}}", response_model=JobView)
    async def job(ref: Ref, request: Request) -> Response:
        """Return one job."""
        return answer(await service.job(await service.resolve(ref, caller_of(request))))

    @app.get(f"{API_PREFIX}/jobs/{{ref}}/events", response_model=EventList)
    async def events(
        ref: Ref,
        request: Request,
        after: Annotated[int, Query(ge=0, le=MAX_SEQUENCE)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
        tail: Annotated[int | None, Query(ge=0, le=MAX_SEQUENCE)] = None,
    ) -> Response:
        """Return the job's history, oldest first, from sequence `after` on; only its last `tail` events, if given."""
        job_id = await service.resolve(ref, caller_of(request))
        found = tuple(await service.events(job_id, after, limit=limit, tail=tail))
        return answer(EventList(events=found, more=len(found) == limit))

    @app.get(f"{API_PREFIX}/jobs/{{ref}}/checkpoints", response_model=CheckpointList)
    async def checkpoints(ref: Ref, request: Request, *, verify: bool = False) -> Response:
        """Return the checkpoints of a job of the caller, newest first; ``verify`` reads every byte."""
        job_id, _ = await _own_job(service, ref, request, "read the checkpoints of")
        found = await service.checkpoints(job_id, verify=verify)
        return answer(CheckpointList(checkpoints=tuple(found)))

    @app.get(f"{API_PREFIX}/jobs/{{ref}}/spec", response_model=SpecView)
    async def spec(ref: Ref, request: Request) -> Response:
        """Return the job's spec as it was resolved at submission; values that look like secrets are masked."""
        return answer(await service.spec(await service.resolve(ref, caller_of(request))))

    @app.get(f"{API_PREFIX}/jobs/{{ref}}/diff/{{other}}", response_model=SpecDiff)
    async def diff(ref: Ref, other: Ref, request: Request) -> Response:
        """Return the differences of the job `other` from the job `ref`."""
        before, after = [await service.resolve(one, caller_of(request)) for one in (ref, other)]
        return answer(await service.diff(before, after))

    @app.get(f"{API_PREFIX}/gpus", response_model=GpuList)
    async def gpus() -> Response:
        """Return every GPU of every node: its newest values, and the ranks that run on it."""
        return answer(GpuList(gpus=tuple(dict(row) for row in await service.gpus())))

    @app.get(f"{API_PREFIX}/nodes", response_model=NodeList)
    async def nodes() -> Response:
        """Return every node of the cluster."""
        return answer(NodeList(nodes=tuple(await service.nodes())))


def _add_waiting_routes(app: FastAPI, service: JobService, closing: asyncio.Event) -> None:
    @app.get(f"{API_PREFIX}/changes", response_model=ChangeReply)
    async def changes(
        request: Request,
        after: Annotated[int | None, Query(ge=0, le=MAX_SEQUENCE)] = None,
        timeout: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)] = MAX_WAIT_SECONDS,  # noqa: ASYNC109 - the query parameter's name
        job: Annotated[list[Annotated[str, Query(pattern=ID_PATTERN)]] | None, Query(max_length=1000)] = None,
    ) -> Response:
        """Return the change counter after a change of ``job`` (none: any) since ``after``, or at the timeout."""
        if after is None:
            return answer(ChangeReply(version=service.change_version()))
        ids = frozenset(JobId(item) for item in job or [])
        version = await until_closing(service.wait_change(after, timeout, ids), closing, request)
        return answer(ChangeReply(version=version))

    @app.get(
        f"{API_PREFIX}/jobs/{{ref}}/logs",
        response_class=StreamingResponse,
        responses={
            200: {"description": "One JSON object a line; see docs/api.md", "content": {"application/x-ndjson": {}}}
        },
    )
    async def logs(
        ref: Ref,
        request: Request,
        rank: Annotated[int | None, Query(ge=0, le=MAX_NUMBER)] = None,
        attempt: Annotated[int | None, Query(ge=1, le=MAX_NUMBER)] = None,
        tail: Annotated[int | None, Query(ge=0, le=1_000_000)] = None,
        since: Annotated[float | None, Query(allow_inf_nan=False)] = None,
        *,
        follow: bool = False,
    ) -> StreamingResponse:
        """Stream lines of the job's log, oldest first."""
        job_id = await service.resolve(ref, caller_of(request))
        query = LogQuery(rank=rank, attempt=attempt, tail=tail, follow=follow, since=since)
        return StreamingResponse(log_stream(service.logs(job_id, query), closing), media_type="application/x-ndjson")


def _add_submission_routes(app: FastAPI, service: JobService, closing: asyncio.Event) -> None:
    @app.post(f"{API_PREFIX}/jobs", response_model=SubmitReply, status_code=201)
    async def submit(body: SubmitBody, request: Request) -> Response:
        """Accept a job: 201 if it is new, 200 if the key is known or secrets are required first."""
        reply = await service.submit(body.request(), caller_of(request))
        audited(request).job = reply.matrix_id or reply.job_id or ""
        return answer(reply, 201 if reply.created else 200)

    @app.post(f"{API_PREFIX}/submissions", response_model=SubmitOutcomes)
    async def submit_together(body: SubmissionsBody, request: Request) -> Response:
        """Accept or refuse several jobs, each by itself; what is accepted is written in one transaction or few."""
        caller = caller_of(request)

        async def outcome_of(each: SubmitBody) -> SubmitOutcome:
            try:
                return SubmitOutcome(reply=await service.submit(each.request(), caller))
            except OrchError as error:
                return SubmitOutcome(problem=error.to_json())

        outcomes = await asyncio.gather(*map(outcome_of, body.submissions))
        ids = [one.reply.job_id for one in outcomes if one.reply is not None and one.reply.job_id]
        record = audited(request)
        record.job, record.detail = " ".join(ids), f"{len(ids)} of {len(outcomes)} accepted"
        return answer(SubmitOutcomes(outcomes=tuple(outcomes)))

    @app.post(f"{API_PREFIX}/plan", response_model=PlanReply)
    async def plan(body: SubmitBody, request: Request) -> Response:
        """Say what a submission would do; store nothing."""
        return answer(await until_closing(service.plan(body.request(), caller_of(request)), closing, request))


def _add_looking_routes(app: FastAPI, service: JobService, closing: asyncio.Event) -> None:
    @app.post(
        f"{API_PREFIX}/jobs/{{ref}}/profile",
        response_class=Response,
        responses={200: {"description": "A Chrome trace, gzipped JSON", "content": {"application/gzip": {}}}},
    )
    async def profile(ref: Ref, body: ProfileBody, request: Request) -> Response:
        """Return a torch.profiler trace of the next steps of a job of the caller."""
        job_id, _ = await _own_job(service, ref, request, "profile")
        data = await until_closing(service.profile(job_id, body.request()), closing, request)
        return Response(data, media_type="application/gzip")

    @app.post(f"{API_PREFIX}/jobs/{{ref}}/stacks", response_model=StacksView)
    async def stacks(ref: Ref, body: StacksBody, request: Request) -> Response:
        """Return the stacks of the ranks of a running job of the caller; they are also written to the ranks' logs."""
        job_id, _ = await _own_job(service, ref, request, "look into")
        return answer(await until_closing(service.stacks(job_id, body.rank), closing, request))


def _add_daemon_routes(app: FastAPI, service: JobService, audit: AuditLog | None) -> None:
    @app.get(f"{API_PREFIX}/audit", response_model=AuditList)
    async def audit_log(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
        since: Annotated[float, Query(ge=0, le=LATEST, allow_inf_nan=False)] = 0.0,
    ) -> Response:
        """Return the last entries of the audit log, the oldest first."""
        _owner_of_daemon(request, "read the audit log")
        entries = [] if audit is None else await audit.entries(limit, since)
        return answer(AuditList(entries=tuple(entries)))

    @app.post(f"{API_PREFIX}/nodes/{{node}}/{{verb}}", response_model=NodeActionReply)
    async def node_action(node: NodeRef, verb: NodeVerb, _: EmptyBody, request: Request) -> Response:
        """Cordon, drain or uncordon a node."""
        caller = _owner_of_daemon(request, f"{verb} a node")
        return answer(await service.node_action(node, verb, caller))

    @app.post(f"{API_PREFIX}/shutdown", response_model=ShutdownReply)
    async def shutdown(body: ShutdownBody, request: Request) -> Response:
        """Stop the daemon; jobs continue unless ``stop_jobs``."""
        caller = _owner_of_daemon(request, "stop it")
        return answer(service.shutdown(stop_jobs=body.stop_jobs, caller=caller))

    @app.post(f"{API_PREFIX}/prune", response_model=PruneReply)
    async def prune(body: PruneBody, request: Request) -> Response:
        """Remove the files and records of jobs that ended long ago."""
        _owner_of_daemon(request, "remove jobs")
        reply = await service.prune(older_than_seconds=body.older_than_seconds, dry_run=body.dry_run)
        return answer(reply)


def _add_page_routes(app: FastAPI, links: PageLinks | None) -> None:
    @app.post(f"{API_PREFIX}/page/link", response_model=PageLinkView)
    async def page_link(_: EmptyBody, request: Request) -> Response:
        """Return a link that signs a browser in to the page, once, as the caller."""
        caller = caller_of(request)
        if links is None:
            raise RefusedError(
                "this daemon serves no page",
                hint="restart it without --page-listen '' (jobs keep running)",
            )
        return answer(links.link(caller))
