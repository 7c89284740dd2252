"""The control application: routes under /api/v1, each a few lines between the gate and the service.

A route parses, calls the service, renders. Only the routes check permissions: every caller that passes the gate may
read; a job's owner and the daemon's owner may act on a job; only the latter may change nodes, prune and shut down.
Long polls and followed logs end when ``closing`` is set, so that the daemon can stop at once.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from orchestrator import __version__
from orchestrator.api.errors import (
    PROBLEM_CONTENT_TYPE,
    BadRequestError,
    DaemonStoppingError,
    InternalError,
    MediaTypeError,
    MethodNotAllowedError,
    NotFoundError,
    NotPermittedError,
    OrchError,
    Problem,
    RefusedError,
)
from orchestrator.api.files import FileDigest, FileList, MissingPieces
from orchestrator.api.matrix_views import MatrixView
from orchestrator.api.page_links import PageLinkView
from orchestrator.api.protocol import (
    API_PREFIX,
    LOG_END_KEY,
    LOG_ERROR_KEY,
    MAX_NUMBER,
    MAX_PAGE,
    MAX_SEQUENCE,
    MAX_WAIT_SECONDS,
    PAGE,
    STREAM_HEARTBEAT_SECONDS,
    Verb,
)
from orchestrator.api.queue_views import OutlookView, QueueShares, QueueView
from orchestrator.api.requests import (
    ActionRequest,
    EmptyRequest,
    MissingPiecesRequest,
    NodeChange,
    ProfileRequest,
    PruneRequest,
    QueueChange,
    ShutdownRequest,
    StacksRequest,
    SubmissionsRequest,
    SubmitRequest,
    refused,
    request_of,
)
from orchestrator.api.server.audit import audited
from orchestrator.api.server.gate import FAILED, STOPPING, Gate, GatePolicy
from orchestrator.api.server.ownership import ID_PATTERN, Ref, caller_of, check_own, own_job_view
from orchestrator.api.server.session_routes import add_session_routes
from orchestrator.api.service import Caller, JobFilter, JobService, LogQuery, NodeVerb, UsageQuery
from orchestrator.api.spec_views import SpecDiff, SpecView
from orchestrator.api.usage_views import EstimateQualityView, UsageReport
from orchestrator.api.views import (
    ActionReply,
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
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence

    from starlette.requests import Request

    from orchestrator.api.files import FileContent, FileReader
    from orchestrator.api.page_links import PageLinks
    from orchestrator.api.server.audit import AuditLog
    from orchestrator.api.service import Caller, JobService
    from orchestrator.api.view import View
    from orchestrator.api.views import LogLine

Result = TypeVar("Result")


class ProblemItem(BaseModel):
    """One error in a text."""

    message: str
    path: str = ""
    line: int | None = None
    column: int | None = None
    hint: str = ""
    source: str = ""


class ProblemDocument(BaseModel):
    """RFC 9457's problem document, with ``code`` for programs, ``hint`` for people and ``problems`` for texts."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    message: str
    hint: str = ""
    problems: list[ProblemItem] = Field(default_factory=list)

    @classmethod
    def media_schema(cls) -> dict[str, object]:
        """Return the document's entry in an OpenAPI response."""
        return {PROBLEM_CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}


def bad_request(found: list[dict[str, object]]) -> BadRequestError:
    """Return the API's error for the errors that Pydantic found in a request; values are left out."""
    problems = []
    for item in found:
        where = item.get("loc")
        steps = [str(step) for step in where] if isinstance(where, tuple) else []
        problems.append(Problem(message=str(item.get("msg", "is wrong")), path=".".join(steps)))
    first = problems[0].render() if problems else "the request cannot be understood"
    return BadRequestError(first, hint="use `orch`, or see /api/v1/openapi.json", problems=problems)


def body_of(cls: type[Any], *, in_path: str = "") -> Any:
    """Return FastAPI's dependency that reads a request from the body; its field ``in_path`` is the parameter of that name."""

    async def read(request: Request) -> Any:
        try:
            values = json.loads(await request.body())
        except (ValueError, RecursionError):
            raise refused("it is not JSON") from None
        if in_path and isinstance(values, dict):
            if in_path in values:
                raise refused(f"Object contains unknown field `{in_path}`")
            values[in_path] = request.path_params[in_path]
        return request_of(cls, values)

    read.body = cls, in_path  # type: ignore[attr-defined]  # for the OpenAPI document
    return Depends(read)


async def until_closing(work: Coroutine[Any, Any, Result], closing: asyncio.Event, request: Request) -> Result:
    """Return the result of ``work``. Raises DaemonStoppingError if the daemon stops or the client disconnects first."""
    task = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(closing.wait()), asyncio.ensure_future(_disconnect(request))]
    try:
        await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DaemonStoppingError("the daemon is stopping")
        return task.result()
    finally:
        await _cancel(task, *others)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def log_stream(
    batches: AsyncGenerator[Sequence[LogLine], None],
    closing: asyncio.Event,
    heartbeat_seconds: float = STREAM_HEARTBEAT_SECONDS,
) -> AsyncGenerator[bytes, None]:
    """Yield the lines as JSON lines; empty lines while there is nothing new; a last line that marks completeness.

    When the daemon stops, the stream ends without that last line, and the client repeats the request later.
    """
    stopped: asyncio.Future[Any] = asyncio.ensure_future(closing.wait())
    following: asyncio.Future[Any] = asyncio.ensure_future(anext(batches))
    try:
        async with aclosing(batches):
            try:
                while not stopped.done():
                    done, _ = await asyncio.wait(
                        [following, stopped], timeout=heartbeat_seconds, return_when=asyncio.FIRST_COMPLETED
                    )
                    if following in done:
                        yield b"".join(_line(line.to_json()) for line in following.result())
                        following = asyncio.ensure_future(anext(batches))
                    elif not done:
                        yield b"\n"
            except StopAsyncIteration:
                yield _line({LOG_END_KEY: "complete"})
            except OrchError as error:
                yield _line({LOG_ERROR_KEY: error.to_json()})
            finally:
                await _cancel(following)  # a generator cannot be closed while it runs
    finally:
        with suppress(asyncio.CancelledError):
            await _cancel(stopped)


def _line(value: dict[str, Any]) -> bytes:
    return (
        json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
    )


FilePath = Annotated[str, Query(min_length=1, max_length=4096)]
Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="The SHA-256 of the piece")]
MAX_OFFSET = 2**53


def add_file_routes(app: FastAPI, service: JobService, answer: Callable[[View], Response]) -> None:
    """Add the three routes of a job's files."""

    async def files_of(ref: str, request: Request) -> FileReader:
        job = await own_job_view(service, ref, caller_of(request), "read files of")
        return await service.job_files(JobId(job.id))

    @app.get(f"{API_PREFIX}/jobs/{{ref}}/files", response_model=FileList)
    async def files(
        ref: Ref,
        request: Request,
        pattern: Annotated[list[Annotated[str, Query(max_length=1024)]] | None, Query(max_length=100)] = None,
    ) -> Response:
        """Return the list of outputs and checkpoints of a job of the caller."""
        return answer(await (await files_of(ref, request)).find(pattern or []))

    @app.get(f"{API_PREFIX}/jobs/{{ref}}/files/digest", response_model=FileDigest)
    async def digest(ref: Ref, request: Request, path: FilePath) -> Response:
        """Return the size and SHA-256 of one file."""
        return answer(await (await files_of(ref, request)).digest(path))

    @app.get(
        f"{API_PREFIX}/jobs/{{ref}}/files/content",
        response_class=StreamingResponse,
        responses={200: {"description": "Its bytes", "content": {"application/octet-stream": {}}}},
    )
    async def content(
        ref: Ref, request: Request, path: FilePath, offset: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0
    ) -> StreamingResponse:
        """Stream the bytes of one file, from `offset` on."""
        found = await (await files_of(ref, request)).open(path)
        return StreamingResponse(_pieces(found, offset), media_type="application/octet-stream")


async def _pieces(content: FileContent, offset: int) -> AsyncGenerator[bytes, None]:
    try:
        while piece := await content.read(offset):
            yield piece
            offset += len(piece)
    finally:
        content.close()


def add_upload_routes(app: FastAPI, service: JobService, answer: Callable[[View], Response]) -> None:
    """Add the routes by which remote submitters upload working directories: missing pieces, and one piece."""

    @app.post(f"{API_PREFIX}/pieces", response_model=MissingPieces)
    async def missing(
        body: Annotated[MissingPiecesRequest, body_of(MissingPiecesRequest)], request: Request
    ) -> Response:
        """Return the pieces that must be sent; the others are kept for a day."""
        found = await service.missing_pieces(body.digests, body.size_bytes, caller_of(request))
        return answer(MissingPieces(missing=tuple(found)))

    @app.post(
        f"{API_PREFIX}/pieces/{{digest}}",
        status_code=204,
        openapi_extra={"requestBody": {"content": {"application/octet-stream": {}}, "required": True}},
    )
    async def put(digest: Sha256, request: Request) -> Response:
        """Keep a piece; it is refused if its content has another SHA-256."""
        if request.headers.get("content-type") != "application/octet-stream":
            raise MediaTypeError("a piece is sent as application/octet-stream")
        await service.put_piece(digest, await request.body(), caller_of(request))
        return Response(status_code=204)


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
    async def act(
        ref: Ref, verb: Verb, body: Annotated[ActionRequest, body_of(ActionRequest, in_path="verb")], request: Request
    ) -> Response:
        """Cancel, pause, resume, hold, release, rerun or update a job of the caller, or a matrix."""
        details = body
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


MAX_REFERENCE = 200
NAME_PATTERN = r"^[a-z0-9](?:[a-z0-9-]{0,48}[a-z0-9])?$"


NodeRef = Annotated[str, Path(pattern=ID_PATTERN, description="A node's id or name")]


def add_node_routes(
    app: FastAPI, service: JobService, owner: Callable[[Request, str], Caller], answer: Callable[[View], Response]
) -> None:
    """Add the routes; ``owner`` as in ``add_queue_routes``."""

    @app.post(f"{API_PREFIX}/nodes/{{node}}", response_model=NodeActionReply)
    async def change_node(
        node: NodeRef, body: Annotated[NodeChange, body_of(NodeChange)], request: Request
    ) -> Response:
        """Change labels and reservations of a node."""
        caller = owner(request, "change a node")
        return answer(await service.change_node(node, body, caller))


def add_queue_routes(
    app: FastAPI, service: JobService, owner: Callable[[Request, str], Caller], answer: Callable[[View], Response]
) -> None:
    """Add the routes; ``owner`` returns the caller if it is the daemon's owner, else it raises."""

    @app.get(f"{API_PREFIX}/queues", response_model=QueueShares)
    async def queues() -> Response:
        """Return the order of waiting jobs, and the shares of queues and users."""
        return answer(await service.queue_shares())

    @app.get(f"{API_PREFIX}/outlook", response_model=OutlookView)
    async def outlook(request: Request, job: Annotated[str, Query(max_length=MAX_REFERENCE)] = "") -> Response:
        """Return when a job is expected to start and why; without ``job``, the starts of the queue's first jobs."""
        return answer(await service.outlook(await service.resolve(job, caller_of(request)) if job else None))

    @app.post(f"{API_PREFIX}/queues/{{name}}", response_model=QueueView)
    async def set_queue(
        name: Annotated[str, Path(pattern=NAME_PATTERN)],
        body: Annotated[QueueChange, body_of(QueueChange)],
        request: Request,
    ) -> Response:
        """Change or create a queue."""
        caller = owner(request, "change a queue")
        return answer(await service.set_queue(name, body, caller))


LATEST = 1e11
Moment = Annotated[float | None, Query(ge=0, le=LATEST, allow_inf_nan=False)]


def add_usage_routes(app: FastAPI, service: JobService, answer: Callable[[View], Response]) -> None:
    """Add the routes."""

    @app.get(f"{API_PREFIX}/usage", response_model=UsageReport)
    async def usage(
        by: Annotated[list[Annotated[str, Query(max_length=80)]] | None, Query(max_length=8)] = None,
        since: Moment = None,
        until: Moment = None,
        price: Annotated[float | None, Query(ge=0, le=1e9, allow_inf_nan=False)] = None,
    ) -> Response:
        """Return GPU hours by phase, waiting, energy and cost between two times, by `user`, `queue` or `label:KEY`."""
        query = UsageQuery(by=tuple(by or ("user",)), since=since, until=until, price=price)
        return answer(await service.usage(query))

    @app.get(f"{API_PREFIX}/estimates", response_model=EstimateQualityView)
    async def estimates() -> Response:
        """Return how often the intervals of estimates of time left contained the actual time."""
        return answer(await service.estimate_quality())


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
            _document_bodies(app, document["paths"], schemas)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = with_problems  # type: ignore[method-assign]  # FastAPI's documented way


def _document_bodies(app: FastAPI, paths: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Add the requests, whose classes FastAPI does not know, to the OpenAPI document."""
    for route in (each for each in app.routes if isinstance(each, APIRoute)):
        for dependency in route.dependant.dependencies:
            cls, in_path = getattr(dependency.call, "body", (None, ""))
            if cls is None:
                continue
            (reference,), found = msgspec.json.schema_components([cls], ref_template="#/components/schemas/{name}")
            if in_path:
                del found[cls.__name__]["properties"][in_path]
                found[cls.__name__]["required"].remove(in_path)
            schemas.update(found)
            for method in route.methods or ():
                paths[route.path_format][method.lower()]["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": reference}},
                }


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
    async def submit(body: Annotated[SubmitRequest, body_of(SubmitRequest)], request: Request) -> Response:
        """Accept a job: 201 if it is new, 200 if the key is known or secrets are required first."""
        body.refuse_too_large()
        reply = await service.submit(body, caller_of(request))
        audited(request).job = reply.matrix_id or reply.job_id or ""
        return answer(reply, 201 if reply.created else 200)

    @app.post(f"{API_PREFIX}/submissions", response_model=SubmitOutcomes)
    async def submit_together(
        body: Annotated[SubmissionsRequest, body_of(SubmissionsRequest)], request: Request
    ) -> Response:
        """Accept or refuse several jobs, each by itself; what is accepted is written in one transaction or few."""
        caller = caller_of(request)

        async def outcome_of(each: SubmitRequest) -> SubmitOutcome:
            try:
                each.refuse_too_large()
                return SubmitOutcome(reply=await service.submit(each, caller))
            except OrchError as error:
                return SubmitOutcome(problem=error.to_json())

        outcomes = await asyncio.gather(*map(outcome_of, body.submissions))
        ids = [one.reply.job_id for one in outcomes if one.reply is not None and one.reply.job_id]
        record = audited(request)
        record.job, record.detail = " ".join(ids), f"{len(ids)} of {len(outcomes)} accepted"
        return answer(SubmitOutcomes(outcomes=tuple(outcomes)))

    @app.post(f"{API_PREFIX}/plan", response_model=PlanReply)
    async def plan(body: Annotated[SubmitRequest, body_of(SubmitRequest)], request: Request) -> Response:
        """Say what a submission would do; store nothing."""
        body.refuse_too_large()
        return answer(await until_closing(service.plan(body, caller_of(request)), closing, request))


def _add_looking_routes(app: FastAPI, service: JobService, closing: asyncio.Event) -> None:
    @app.post(
        f"{API_PREFIX}/jobs/{{ref}}/profile",
        response_class=Response,
        responses={200: {"description": "A Chrome trace, gzipped JSON", "content": {"application/gzip": {}}}},
    )
    async def profile(ref: Ref, body: Annotated[ProfileRequest, body_of(ProfileRequest)], request: Request) -> Response:
        """Return a torch.profiler trace of the next steps of a job of the caller."""
        job_id, _ = await _own_job(service, ref, request, "profile")
        data = await until_closing(service.profile(job_id, body), closing, request)
        return Response(data, media_type="application/gzip")

    @app.post(f"{API_PREFIX}/jobs/{{ref}}/stacks", response_model=StacksView)
    async def stacks(ref: Ref, body: Annotated[StacksRequest, body_of(StacksRequest)], request: Request) -> Response:
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
    async def node_action(
        node: NodeRef, verb: NodeVerb, _: Annotated[EmptyRequest, body_of(EmptyRequest)], request: Request
    ) -> Response:
        """Cordon, drain or uncordon a node."""
        caller = _owner_of_daemon(request, f"{verb} a node")
        return answer(await service.node_action(node, verb, caller))

    @app.post(f"{API_PREFIX}/shutdown", response_model=ShutdownReply)
    async def shutdown(body: Annotated[ShutdownRequest, body_of(ShutdownRequest)], request: Request) -> Response:
        """Stop the daemon; jobs continue unless ``stop_jobs``."""
        caller = _owner_of_daemon(request, "stop it")
        return answer(service.shutdown(stop_jobs=body.stop_jobs, caller=caller))

    @app.post(f"{API_PREFIX}/prune", response_model=PruneReply)
    async def prune(body: Annotated[PruneRequest, body_of(PruneRequest)], request: Request) -> Response:
        """Remove the files and records of jobs that ended long ago."""
        _owner_of_daemon(request, "remove jobs")
        reply = await service.prune(older_than_seconds=body.older_than_seconds, dry_run=body.dry_run)
        return answer(reply)


def _add_page_routes(app: FastAPI, links: PageLinks | None) -> None:
    @app.post(f"{API_PREFIX}/page/link", response_model=PageLinkView)
    async def page_link(_: Annotated[EmptyRequest, body_of(EmptyRequest)], request: Request) -> Response:
        """Return a link that signs a browser in to the page, once, as the caller."""
        caller = caller_of(request)
        if links is None:
            raise RefusedError(
                "this daemon serves no page",
                hint="restart it without --page-listen '' (jobs keep running)",
            )
        return answer(links.link(caller))
