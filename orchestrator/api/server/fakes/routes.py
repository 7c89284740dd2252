"""The control application for one fake after another: making it takes a tenth of a second, most of it in Pydantic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from orchestrator.api.server.app import control_routes

if TYPE_CHECKING:
    import asyncio

    from fastapi import FastAPI


class _Standin:
    """Has the attributes of what it stands for at the moment."""

    stands_for: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)


class Routes:
    """The application for the service that ``lend`` was last called with."""

    def __init__(self) -> None:
        self.service, self.closing = _Standin(), _Standin()
        service: Any = self.service
        self.app: FastAPI = control_routes(service, cast("asyncio.Event", self.closing), service)

    def release(self) -> None:
        """Let another fake have them. No request may be running."""
        _FREE.append(self)


_FREE: Final[list[Routes]] = []


def lend(service: object, closing: asyncio.Event) -> Routes:
    """Return routes that no other fake has, until ``release``."""
    routes = _FREE.pop() if _FREE else Routes()
    routes.service.stands_for, routes.closing.stands_for = service, closing
    return routes
