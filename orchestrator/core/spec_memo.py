"""Caches values derived from job specs. A long queue has few different specs, each one object that many jobs share. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.spec.model import JobSpec

T = TypeVar("T")
G = TypeVar("G")


class SpecMemo(Generic[T]):
    """Values of specs, by identity. A value goes with its spec: a spec may be large, and its job may end at any time."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[JobSpec], T]] = {}

    def of(self, spec: JobSpec, make: Callable[[G], T], given: G) -> T:
        """Return the value of the spec: the result of ``make(given)`` when the spec was not in the cache."""
        key = id(spec)
        known = self._known.get(key)
        if known is not None and known[0]() is spec:
            return known[1]
        value = make(given)
        self._known[key] = ref(spec, lambda gone: self._forget(key, gone)), value
        return value

    def _forget(self, key: int, gone: ref[JobSpec]) -> None:
        known = self._known.get(key)
        if known is not None and known[0] is gone:  # another spec may have got the same id meanwhile
            del self._known[key]
