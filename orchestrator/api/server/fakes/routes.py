"""Control application reused by one fake after another: making one takes 0.1 s, most of it in Pydantic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from orchestrator.api.server.app import control_routes

if TYPE_CHECKING:
    import asyncio

    from fastapi import FastAPI


class _Standin:
    """Proxy with the attributes of ``stands_for``."""

    stands_for: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)


class Routes:
    """The application for the service that ``lend`` was last called with."""

    def __init__(self) -> None:
        self.service, self.closing = _Standin(), _Standin()
        service: Any = self.service
        self.app: FastAPI = control_routes(service, cast("asyncio.Event", self.closing), service, service)

    def release(self) -> None:
        """Make the routes available to another fake. No request may be running."""
        _FREE.append(self)


_FREE: Final[list[Routes]] = []


def lend(service: object, closing: asyncio.Event) -> Routes:
    """Return routes that no other fake uses until ``release``."""
    routes = _FREE.pop() if _FREE else Routes()
    routes.service.stands_for, routes.closing.stands_for = service, closing
    return routes
