"""The reading listener: metrics, health and service discovery for Prometheus and probes. GET and HEAD, nothing else.

It shares no route with the control application: its requests change nothing and expose no secret.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.api.errors import PROBLEM_CONTENT_TYPE, BadRequestError, MethodNotAllowedError, NotFoundError
from orchestrator.api.protocol import API_PREFIX
from orchestrator.api.server.gate import Gate, GatePolicy
from orchestrator.api.server.listeners import host_names, is_loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from orchestrator.api.views import TargetGroup

METHODS = ("GET", "HEAD")


class MetricsPage(NamedTuple):
    """A page of metrics and its media type, which distinguishes text format from OpenMetrics."""

    body: bytes
    content_type: str


class ReadSource(Protocol):
    """The content of the reading listener. Methods are called from the daemon's event loop."""

    async def metrics(self, accept: str) -> MetricsPage:
        """Return every metric of the daemon, in the format that the scraper's Accept header prefers."""
        ...

    async def targets(self) -> Sequence[TargetGroup]:
        """Return the exporters to scrape, for Prometheus's HTTP service discovery."""
        ...

    async def not_ready(self) -> Sequence[str]:
        """Return the reasons why no job can be accepted and placed now, by a check of each part; empty if one can."""
        ...


def read_policy(host: str, token: str, owner_uid: int) -> GatePolicy:
    """Return the gate of a reading listener. Raises BadRequestError without a token if ``host`` is not loopback.

    With a token any Host is accepted: a web page that uses a forged name does not have the token.
    """
    if not token and not is_loopback(host):
        raise BadRequestError(
            f"reading on {host} would be open to the network", hint="set a token, or listen on 127.0.0.1"
        )
    return GatePolicy(
        owner_uid=owner_uid,
        token=token,
        open_to_all=not token,
        hosts=None if token else host_names(host),
        methods=frozenset(METHODS),
    )


def create_read_app(source: ReadSource, policy: GatePolicy) -> Gate:
    """Return the reading application behind its gate."""

    async def metrics(request: Request) -> Response:
        page = await source.metrics(request.headers.get("accept", ""))
        return Response(page.body, headers={"content-type": page.content_type})

    async def healthz(_: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def readyz(_: Request) -> Response:
        problems = await source.not_ready()
        text = "\n".join(["not ready", *problems]) + "\n" if problems else "ready\n"
        return Response(text, status_code=503 if problems else 200, media_type="text/plain")

    async def targets(_: Request) -> Response:
        return JSONResponse([group.to_json() for group in await source.targets()])

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            problem: NotFoundError | MethodNotAllowedError = MethodNotAllowedError("this listener only reads")
        else:
            problem = NotFoundError(
                f"there is no page {request.url.path}", hint="there are /metrics, /healthz, /readyz"
            )
        return Response(json.dumps(problem.to_json()), problem.http_status, media_type=PROBLEM_CONTENT_TYPE)

    routes = [
        Route("/metrics", metrics, methods=METHODS),
        Route("/healthz", healthz, methods=METHODS),
        Route("/readyz", readyz, methods=METHODS),
        Route(f"{API_PREFIX}/prometheus/targets", targets, methods=METHODS),
    ]
    return Gate(Starlette(routes=routes, exception_handlers={HTTPException: refused}), policy)
