"""Uploads of working directories by remote submitters: which pieces are missing, and one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Path, Request
from fastapi.responses import Response

from orchestrator.api.errors import MediaTypeError
from orchestrator.api.files import MissingPieces
from orchestrator.api.protocol import API_PREFIX
from orchestrator.api.server.bodies import MissingPiecesBody  # noqa: TC001 - FastAPI reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from orchestrator.api.service import Caller, JobService
    from orchestrator.api.views import View

Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="The SHA-256 of the piece")]


def add_upload_routes(
    app: FastAPI, service: JobService, caller_of: Callable[[Request], Caller], answer: Callable[[View], Response]
) -> None:
    """The two routes."""

    @app.post(f"{API_PREFIX}/pieces", response_model=MissingPieces)
    async def missing(body: MissingPiecesBody, request: Request) -> Response:
        """Which of these pieces have to be sent; the others are kept for a day."""
        found = await service.missing_pieces(tuple(body.digests), body.size_bytes, caller_of(request))
        return answer(MissingPieces(missing=tuple(found)))

    @app.post(
        f"{API_PREFIX}/pieces/{{digest}}",
        status_code=204,
        openapi_extra={"requestBody": {"content": {"application/octet-stream": {}}, "required": True}},
    )
    async def put(digest: Sha256, request: Request) -> Response:
        """Keep a piece; it is refused where its content has another SHA-256."""
        if request.headers.get("content-type") != "application/octet-stream":
            raise MediaTypeError("a piece is sent as application/octet-stream")
        await service.put_piece(digest, await request.body(), caller_of(request))
        return Response(status_code=204)
