"""Describes a search as it was submitted, for making further trials. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.spec.search import objectives_of, prunes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.api.service import SubmitRequest
    from orchestrator.daemon.submitting.checking import Checked


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """A search as it was submitted: its file, the space in the form of ``analysis.search.process``, and its limits."""

    matrix_id: str
    name: str
    yaml: str
    source: str
    overrides: tuple[str, ...]
    passed: Mapping[str, str]
    space: Mapping[str, Any]
    trials: int
    max_concurrent: int
    fail_fast: bool

    @property
    def objectives(self) -> dict[str, str]:
        """The metrics to optimize: `min` or `max` by name."""
        return dict(self.space["objectives"])


def plan_of(request: SubmitRequest, first: Checked) -> SearchPlan | None:
    """Return the search that a submission requests; ``first`` is its first trial. None for any other."""
    matrix, cell = first.search, first.cell
    if matrix is None or cell is None:
        return None
    objectives = dict(objectives_of(matrix, first.spec.checkpoint))
    return SearchPlan(
        matrix_id=cell.matrix_id,
        name=cell.name,
        yaml=request.yaml,
        source=request.source,
        overrides=request.overrides,
        passed=dict(request.passed),
        space={
            "name": cell.matrix_id,
            "objectives": objectives,
            "parameters": {name: list(values) for name, values in matrix.parameters.items()},
            "ranges": {
                name: {"low": bounds.low, "high": bounds.high, "log": bounds.log}
                for name, bounds in matrix.ranges.items()
            },
            "prunes": prunes(matrix, objectives),
            "warmup_steps": matrix.warmup_steps,
        },
        trials=cell.count,
        max_concurrent=cell.max_concurrent or 1,
        fail_fast=cell.fail_fast,
    )
