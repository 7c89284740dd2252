"""Caches values derived from job specs. A long queue has few different specs, each one object that many jobs share. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.spec.model import JobSpec

T = TypeVar("T")
G = TypeVar("G")


class SpecMemo(Generic[T]):
    """Values of at most ``most`` specs, by identity; each spec is referenced, so that no other object gets its id."""

    __slots__ = ("_known", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[int, tuple[JobSpec, T]] = {}

    def of(self, spec: JobSpec, make: Callable[[G], T], given: G) -> T:
        """Return the value of the spec: the result of ``make(given)`` when the spec was not in the cache."""
        known = self._known.get(id(spec))
        if known is not None and known[0] is spec:
            return known[1]
        if len(self._known) >= self._most:
            self._known.clear()
        value = make(given)
        self._known[id(spec)] = spec, value
        return value
