"""Code that the page's routes share: the caller, forms, and answers as HTML or as streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, quote

from markupsafe import Markup
from starlette.responses import HTMLResponse, Response, StreamingResponse

from orchestrator.api.errors import BadRequestError, NotPermittedError, UnauthenticatedError
from orchestrator.api.service import Caller
from orchestrator.web.rendering import render
from orchestrator.web.sign_in import REMEDY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

EVENT_STREAM: Final = "text/event-stream"
MAX_NOTE: Final = 400
MAX_FIELDS: Final = 32


def frame(caller: Caller | None) -> dict[str, Any]:
    """Return the values that every page's frame needs."""
    return {"caller": caller, "here": "", "live": "", "note": ""}


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a page of this template."""
    note = request.query_params.get("note", "")[:MAX_NOTE]
    outer = {**frame(getattr(request.state, "caller", None)), "note": note}
    return HTMLResponse(render(template, **{**outer, **values}).encode("utf-8", "replace"), status_code=status)


def event_stream(events: Any) -> Response:
    """Return an answer of server-sent events."""
    return StreamingResponse(events, media_type=EVENT_STREAM, headers={"cache-control": "no-store"})


def markup(parts: Mapping[str, str]) -> dict[str, Markup]:
    """Mark rendered parts, for a template that inserts them unescaped."""
    return {name: Markup(html) for name, html in parts.items()}  # noqa: S704 - a template's output, escaped there


def caller_of(request: Request) -> Caller:
    """Return the caller. Raises UnauthenticatedError if the guard did not set it."""
    caller = getattr(request.state, "caller", None)
    if not isinstance(caller, Caller):
        raise UnauthenticatedError("this browser is not signed in", hint=REMEDY)
    return caller


def owner_of_daemon(request: Request, what: str) -> Caller:
    """Return the caller. Raises NotPermittedError for a user other than the daemon's owner."""
    caller = caller_of(request)
    if not caller.is_owner:
        raise NotPermittedError(f"only the daemon's owner may {what}; you are {caller.user}", hint="ask its owner")
    return caller


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form; the last value of a repeated field. Raises BadRequestError."""
    body = (await request.body()).decode("utf-8", "replace")
    try:
        found = parse_qs(body, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise BadRequestError(f"a form with more than {MAX_FIELDS} fields is refused") from error
    return {name: values[-1] for name, values in found.items()}


def job_address(job_id: str) -> str:
    """Return the address of a job's page."""
    return f"/jobs/{quote(job_id, safe='')}"


def node_address(name: str) -> str:
    """Return the address of a node's page."""
    return f"/nodes/{quote(name, safe='')}"
