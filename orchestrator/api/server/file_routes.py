"""Routes that list, digest and send a job's files, to the job's user and the daemon's owner; and routes of uploads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from orchestrator.api.errors import MediaTypeError
from orchestrator.api.files import FileDigest, FileList, MissingPieces
from orchestrator.api.protocol import API_PREFIX
from orchestrator.api.server.bodies import MissingPiecesBody  # noqa: TC001 - FastAPI reads the annotations
from orchestrator.api.server.ownership import Ref, caller_of, own_job_view
from orchestrator.core.ids import JobId

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from fastapi import FastAPI

    from orchestrator.api.files import FileContent, FileReader
    from orchestrator.api.service import JobService
    from orchestrator.api.views import View

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
    async def missing(body: MissingPiecesBody, request: Request) -> Response:
        """Return the pieces that must be sent; the others are kept for a day."""
        found = await service.missing_pieces(tuple(body.digests), body.size_bytes, caller_of(request))
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
