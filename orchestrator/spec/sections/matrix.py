# ruff: noqa: D102 - the base class documents the methods of a kind
"""The keys below `matrix:` of job.yaml. Pydantic reads the annotations when the program runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from orchestrator.spec.fields.kinds import (
    INTEGER,
    SCIENTIFIC,
    Boolean,
    Choice,
    Doc,
    Json,
    Kind,
    Null,
    Schema,
    Text,
    Whole,
    written,
)
from orchestrator.spec.fields.nodes import Node  # noqa: TC001
from orchestrator.spec.fields.records import Keyed, Listed, Record
from orchestrator.spec.fields.rules import ENV_PATTERN, ENV_REMEDY
from orchestrator.spec.problems import BadValueError, quoted

T = TypeVar("T")

MAX_AT_ONCE = 10_000
MAX_MATRIX_JOBS = 1000
"""Maximum number of jobs of one matrix: each has a working copy of its own."""
MAX_OBJECTIVES = 4
MAX_METRIC_NAME = 255
MatrixValue = bool | int | float | str
MatrixStrategy = Literal["grid", "optuna"]
Pruner = Literal["median", "none"]
Order = Literal["min", "max"]
Parameter = Annotated[str, Text("a parameter's name", pattern=ENV_PATTERN, remedy=ENV_REMEDY, max_length=255)]
Scalar = Annotated[MatrixValue, Json(scalar=True)]
Values = Annotated[Mapping[Parameter, Scalar], Keyed()]
Items = Annotated[tuple[T, ...], Listed()]


class Bound(Kind):
    """A number, also as `1e-4`. Its written form distinguishes whole numbers (`8`) from all others (`8.0`)."""

    def read(self, node: Node) -> int | float:
        text = written(node, "a number")
        if INTEGER.fullmatch(text):
            return int(text)
        value = float(text) if SCIENTIFIC.fullmatch(text) else math.nan
        if not math.isfinite(value):
            raise BadValueError(f"{quoted(text)} is not a number", "write 8, 0.5 or 1e-4")
        return value

    def describe(self) -> Schema:
        return {"anyOf": [{"type": "number"}, {"type": "string", "pattern": f"^(?:{SCIENTIFIC.pattern})$"}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSpec(Record):
    """Values between two bounds, which are included."""

    low: Annotated[int | float, Bound(), Doc("smallest value")]
    high: Annotated[int | float, Bound(), Doc("largest value; both bounds without a point: whole numbers only")]
    log: Annotated[bool, Boolean(), Doc("spread over the orders of magnitude")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSpec(Record):
    """One job file, many jobs: one for each combination of the parameters, or one for each trial of a search."""

    parameters: Annotated[
        Mapping[Parameter, Items[Scalar]],
        Keyed(50),
        Doc("each parameter's values; with grid, a job for each combination, at most 1,000"),
    ] = field(default_factory=dict)
    include: Annotated[
        Items[Values], Doc("further combinations, with a value for each parameter; with optuna, the first trials")
    ] = ()
    exclude: Annotated[Items[Values], Doc("combinations to leave out; only with grid")] = ()
    max_concurrent: Annotated[
        Annotated[int, Whole(1, MAX_AT_ONCE)] | None,
        Null(),
        Doc("most jobs of the matrix at a time; null: no limit, with optuna 1"),
    ] = None
    fail_fast: Annotated[bool, Boolean(), Doc("cancel the others when one fails")] = False
    strategy: Annotated[
        MatrixStrategy, Choice(), Doc("grid: every combination; optuna: values are chosen from earlier results")
    ] = "grid"
    ranges: Annotated[
        Mapping[Parameter, RangeSpec], Keyed(50), Doc("parameters with values between bounds; only with optuna")
    ] = field(default_factory=dict)
    trials: Annotated[
        Annotated[int, Whole(1, MAX_MATRIX_JOBS)] | None, Null(), Doc("number of jobs; required with optuna")
    ] = None
    objectives: Annotated[
        Mapping[
            Annotated[str, Text("a metric's name", max_length=MAX_METRIC_NAME)],
            Annotated[Order, Choice(instead={"minimize": "min", "maximize": "max"})],
        ],
        Keyed(MAX_OBJECTIVES),
        Doc(
            "the metrics to optimize: `{METRIC: min}` or `max`; `energy_joules` and `seconds` are measured."
            " Default: checkpoint.score_attribute; only with optuna"
        ),
    ] = field(default_factory=dict)
    pruner: Annotated[
        Annotated[Pruner, Choice()] | None,
        Null(),
        Doc(
            "median: stop trials that do worse than the median; null: median with one reported metric; only with optuna"
        ),
    ] = None
    warmup_steps: Annotated[
        int, Whole(0, 2**53), Doc("steps of each trial before it may be pruned; only with optuna")
    ] = 0
