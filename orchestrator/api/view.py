"""Base of all API views: their JSON form. Only the standard library is imported: the command line loads this module."""

from __future__ import annotations

from dataclasses import fields
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, Self

from orchestrator.api.errors import ProtocolMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping


class View:
    """Base of all views: converts to JSON-ready values and back."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the view as JSON-ready values, nested views included."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]  # every subclass is a dataclass

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Return the view that ``data`` describes. Raises ProtocolMismatchError if a required key is missing."""
        if not isinstance(data, dict):
            raise ProtocolMismatchError(f"the daemon's answer is not a {cls.__name__}")
        nested = NESTED.get(cls, {})
        values = {
            f.name: _nest(nested.get(f.name), data[f.name])
            for f in fields(cls)  # type: ignore[arg-type]  # every subclass is a dataclass
            if f.name in data
        }
        try:
            return cls(**values)
        except TypeError as error:
            raise ProtocolMismatchError(f"the daemon's answer is not a {cls.__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, View):
        return value.to_json()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not isfinite(value):
        return None  # JSON has no NaN, and a job with a diverged loss must remain readable
    return value


def _nest(cls: type[View] | None, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value if cls is None else (cls.from_json(item) for item in value))
    return value if cls is None or value is None else cls.from_json(value)


NESTED: Final[dict[type[View], Mapping[str, type[View]]]] = {}
"""The fields of each view that hold views."""
