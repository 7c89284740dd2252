"""Advice by parameter count and batch size alone: the baseline for the cost model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.bench.benchmark import look_at
from orchestrator.bench.plan import check
from orchestrator.bench.processes import RankProcesses, rank_environ

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from orchestrator.bench.plan import BenchRequest

SMALL_MOST_PARAMETERS: Final = 1_000_000
MEDIUM_MOST_PARAMETERS: Final = 5_000_000
LARGE_LEAST_PARAMETERS: Final = 10_000_000
MEDIUM_LEAST_BATCH: Final = 128
LARGE_LEAST_BATCH: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdAdvice:
    """Whether several GPUs are used: yes, no, or None where the thresholds recommend a measurement."""

    several: bool | None
    reason: str


def advise_by_thresholds(parameters: int, batch: int) -> ThresholdAdvice:
    """Return the thresholds' advice for a model and a global batch."""
    if parameters < SMALL_MOST_PARAMETERS:
        return ThresholdAdvice(several=False, reason=f"{parameters} parameters: the model is too small")
    if parameters < MEDIUM_MOST_PARAMETERS:
        if batch < MEDIUM_LEAST_BATCH:
            return ThresholdAdvice(several=False, reason=f"a batch of {batch} is too small for {parameters} parameters")
        return ThresholdAdvice(several=None, reason="a medium model may gain from a large batch: measure")
    if parameters < LARGE_LEAST_PARAMETERS:
        return ThresholdAdvice(several=None, reason=f"{parameters} parameters lie between the thresholds: measure")
    if batch < LARGE_LEAST_BATCH:
        return ThresholdAdvice(
            several=False, reason=f"a batch of {batch} is too small: use {LARGE_LEAST_BATCH} or more"
        )
    return ThresholdAdvice(several=True, reason=f"{parameters} parameters gain from several GPUs")


def run_thresholds(
    request: BenchRequest, *, environ: Mapping[str, str], logs: Path
) -> tuple[int, dict[int, ThresholdAdvice]]:
    """Return the parameter count, and the advice by global batch. Raises BenchError for a model that cannot be made."""
    check(request)
    with RankProcesses(logs, rank_environ(environ, request.threads)) as ranks:
        parameters = look_at(ranks, request).parameters
    return parameters, {batch: advise_by_thresholds(parameters, batch) for batch in sorted(request.batch_sizes)}
