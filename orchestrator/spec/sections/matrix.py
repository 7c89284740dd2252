"""The keys below `matrix:` of job.yaml. Pydantic reads the annotations when the program runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from orchestrator.spec.fields.kinds import Boolean, Choice, Doc, Json, Null, Text, Whole
from orchestrator.spec.fields.records import Keyed, Listed, Record
from orchestrator.spec.fields.rules import ENV_PATTERN, ENV_REMEDY

T = TypeVar("T")

MAX_AT_ONCE = 10_000
MatrixValue = bool | int | float | str
MatrixStrategy = Literal["grid"]
Parameter = Annotated[str, Text("a parameter's name", pattern=ENV_PATTERN, remedy=ENV_REMEDY, max_length=255)]
Scalar = Annotated[MatrixValue, Json(scalar=True)]
Values = Annotated[Mapping[Parameter, Scalar], Keyed()]
Items = Annotated[tuple[T, ...], Listed()]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSpec(Record):
    """One job file, many jobs: one for each combination of the parameters."""

    parameters: Annotated[
        Mapping[Parameter, Items[Scalar]],
        Keyed(50),
        Doc("each parameter's values; a job for each combination, at most 1,000"),
    ] = field(default_factory=dict)
    include: Annotated[Items[Values], Doc("further combinations, with a value for each parameter")] = ()
    exclude: Annotated[Items[Values], Doc("combinations to leave out")] = ()
    max_concurrent: Annotated[
        Annotated[int, Whole(1, MAX_AT_ONCE)] | None, Null(), Doc("most jobs of the matrix at a time; null: no limit")
    ] = None
    fail_fast: Annotated[bool, Boolean(), Doc("cancel the others when one fails")] = False
    strategy: Annotated[MatrixStrategy, Choice(), Doc("grid: every combination")] = "grid"
