"""Copies of records for tests, whichever of the two kinds they are."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def replace(record: T, **changes: Any) -> T:
    """Return a copy of a stored record or of a dataclass with other values: ``copy.replace`` of Python 3.13."""
    if isinstance(record, msgspec.Struct):
        return msgspec.structs.replace(record, **changes)
    return dataclasses.replace(record, **changes)  # type: ignore[type-var]  # a dataclass
