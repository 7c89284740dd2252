"""One trial of a search, as its results are written and drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A trial: its values, and its result for each objective; no results where it was pruned or has failed."""

    number: int
    job_id: str
    state: str
    values: Mapping[str, Any]
    given: Mapping[str, float] = field(default_factory=dict)
    pruned: bool = False
    is_best: bool = False
