"""Resources of each rank, and the forms of `resources.num_workers` in job.yaml: an elastic range, and the limits and advice of `auto`. Part of `model`, which re-exports them."""

from __future__ import annotations

# Pydantic reads the annotations when the program runs.
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, ClassVar, TypeVar

from orchestrator.spec.fields.kinds import Boolean, Doc, Duration, Memory, Null, Number, Text, Whole
from orchestrator.spec.fields.records import Record

T = TypeVar("T")
Maybe = Annotated[T | None, Null()]
MAX_WORKERS = 10_000
MAX_GPUS_PER_WORKER = 64
Workers = Annotated[int, Whole(1, MAX_WORKERS)]
YesNo = Annotated[bool, Boolean()]
Time = Annotated[timedelta, Duration(minimum=timedelta(seconds=1))]
Factor = Annotated[float, Number(0, 100, digits=4)]
Milliseconds = Annotated[float, Number(0, 10**9, digits=4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticWorkers(Record):
    """Any number of ranks from `min` to `max`. An attempt runs at least `grow_after` before it is stopped to grow."""

    min: Annotated[Workers, Doc("fewest ranks it runs with")]
    max: Annotated[Workers, Doc("most ranks it grows to")]
    grow_after: Annotated[Time, Doc("how long it runs before it is stopped to start on more ranks")] = timedelta(
        minutes=5
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAdvice(Record):
    """Result of `orch advise` for the job's script: a number of ranks, and the figures that support it."""

    shorthand: ClassVar[str] = "write advice: {ranks: 4}"

    ranks: Annotated[Workers, Doc("advised number of ranks")]
    certain: Annotated[YesNo, Doc("whether the intervals of the predictions confirm the advice")] = False
    compared_ranks: Annotated[
        Maybe[Workers],
        Doc("ranks that the figures below are of: the advised number, or a larger one that does not pay"),
    ] = None
    efficiency: Annotated[
        Maybe[Factor],
        Doc("throughput of each rank, as a share of one rank's alone"),
    ] = None
    compute_ms: Annotated[Maybe[Milliseconds], Doc("computation of a step with this number of ranks")] = None
    exposed_ms: Annotated[Maybe[Milliseconds], Doc("what a step waits for communication")] = None
    gradient_bytes: Annotated[
        Maybe[Annotated[int, Whole(0, 10**15)]], Doc("bytes of gradients that ranks exchange in each step")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoWorkers(Record):
    """Limits of `num_workers: auto`, and the advice that it follows. The advice is part of the job: nothing is measured when the job is scheduled."""

    shorthand: ClassVar[str] = "write auto: {min: 1, max: 8}"

    min: Annotated[Workers, Doc("fewest ranks")] = 1
    max: Annotated[Workers, Doc("most ranks")] = MAX_WORKERS
    advice: Annotated[
        Maybe[WorkerAdvice], Doc("what `orch submit --advise` found; null: as many as are free at its first start")
    ] = None

    @property
    def advised(self) -> int | None:
        """The advised number of ranks, within the limits; None without advice."""
        return None if self.advice is None else max(self.min, min(self.max, self.advice.ranks))

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most ranks of the first start."""
        return (self.min, self.max) if self.advised is None else (self.advised, self.advised)


def _without_unit(attribute: str) -> str:
    """Return the key of an attribute: `memory` for `memory_bytes`, because in the file the value has a unit."""
    return attribute.removesuffix("_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResources(Record):
    """Resources of each rank. A fraction of a GPU shares it; a number above 1 is whole."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "alias_generator": _without_unit}

    shorthand: ClassVar[str] = "write resources_per_worker: {gpu: 1, cpu: 1}"

    gpu: Annotated[
        float,
        Number(0, MAX_GPUS_PER_WORKER, digits=4),
        Doc("GPUs for each rank; a fraction shares one, 0 runs on the CPU, a number above 1 is whole"),
    ] = 1.0
    cpu: Annotated[float, Number(0, 4096, digits=4), Doc("processor cores for each rank, reserved")] = 1.0
    memory_bytes: Annotated[
        Maybe[Annotated[int, Memory(minimum=1_000_000)]],
        Doc(
            "main memory for each rank, in bytes, reserved, and its limit where the node can set one; 8GB is 8*10^9, 8GiB is 8*2^30; null reserves none"
        ),
    ] = None
    gpu_model: Annotated[
        Maybe[Annotated[str, Text("a GPU model", max_length=100)]],
        Doc("only nodes with GPUs of this model, as `orch nodes` shows it"),
    ] = None
