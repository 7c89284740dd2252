"""A gang's handle of a rank actor that may serve other gangs later: each call names the gang that it is for."""

from __future__ import annotations

from typing import Any


class ServedActor:
    """Calls the actor behind Ray's ``handle`` for the gang ``user``; the actor refuses calls for any other than its current one.

    Supports the part of Ray's handle that callers use: ``actor.method.remote(...)``.
    """

    def __init__(self, handle: Any, user: str) -> None:
        self.handle = handle
        self._user = user

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self.handle, self._user, name)


class _Method:
    def __init__(self, handle: Any, user: str, name: str) -> None:
        self._handle, self._user, self._name = handle, user, name

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Send the call; return Ray's reference to its answer."""
        return self._handle.serve.remote(self._user, self._name, *args, **kwargs)


def served(handle: Any, user: str) -> Any:
    """Return the gang's handle; Ray's own for an actor of an earlier version, which serves one gang."""
    return ServedActor(handle, user) if hasattr(handle, "serve") else handle


def handle_of(actor: Any) -> Any:
    """Return Ray's own handle."""
    return actor.handle if isinstance(actor, ServedActor) else actor
