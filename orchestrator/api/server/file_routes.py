"""Files that a job left: listed, digested, and sent from any offset on, to the job's user and the daemon's owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse

from orchestrator.api.files import FileDigest, FileList
from orchestrator.api.protocol import API_PREFIX
from orchestrator.api.server.ownership import Ref, own_job_view
from orchestrator.core.ids import JobId

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from fastapi import FastAPI

    from orchestrator.api.files import FileContent, FileReader
    from orchestrator.api.service import Caller, JobService
    from orchestrator.api.views import View

FilePath = Annotated[str, Query(min_length=1, max_length=4096)]
MAX_OFFSET = 2**53


def add_file_routes(
    app: FastAPI, service: JobService, caller_of: Callable[[Request], Caller], answer: Callable[[View], Response]
) -> None:
    """The three routes."""

    async def files_of(ref: str, request: Request) -> FileReader:
        job = await own_job_view(service, ref, caller_of(request), "read files of")
        return await service.job_files(JobId(job.id))

    @app.get(f"{API_PREFIX}/jobs/{{ref}}/files", response_model=FileList)
    async def files(
        ref: Ref,
        request: Request,
        pattern: Annotated[list[Annotated[str, Query(max_length=1024)]] | None, Query(max_length=100)] = None,
    ) -> Response:
        """Outputs and checkpoints of a job of one's own."""
        return answer(await (await files_of(ref, request)).find(pattern or []))

    @app.get(f"{API_PREFIX}/jobs/{{ref}}/files/digest", response_model=FileDigest)
    async def digest(ref: Ref, request: Request, path: FilePath) -> Response:
        """The SHA-256 of one of them."""
        return answer(await (await files_of(ref, request)).digest(path))

    @app.get(
        f"{API_PREFIX}/jobs/{{ref}}/files/content",
        response_class=StreamingResponse,
        responses={200: {"description": "Its bytes", "content": {"application/octet-stream": {}}}},
    )
    async def content(
        ref: Ref, request: Request, path: FilePath, offset: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0
    ) -> StreamingResponse:
        """The bytes of one of them, from `offset` on."""
        found = await (await files_of(ref, request)).open(path)
        return StreamingResponse(_pieces(found, offset), media_type="application/octet-stream")


async def _pieces(content: FileContent, offset: int) -> AsyncGenerator[bytes, None]:
    try:
        while piece := await content.read(offset):
            yield piece
            offset += len(piece)
    finally:
        content.close()
