"""Sentences about moves of running jobs."""

from __future__ import annotations

from datetime import UTC, datetime

from orchestrator.core.facts import moves  # noqa: TC001  # singledispatch reads the annotations
from orchestrator.core.facts.moves import MoveRefusal
from orchestrator.core.sentences.base import sentence


@sentence.register
def _(fact: moves.ByConsolidation) -> str:
    return (
        f"to {_nodes(fact.names)} to make room for {fact.job}: it loses at most {_hours(fact.lost_gpu_seconds)}, "
        f"{fact.job} gains {_hours(fact.gained_gpu_seconds)}"
    )


@sentence.register
def _(fact: moves.AwaitsMoves) -> str:
    return f"waiting until {', '.join(fact.jobs)} {'has' if len(fact.jobs) == 1 else 'have'} moved to make room"


@sentence.register
def _(fact: moves.Consolidation) -> str:
    targets = "; ".join(f"{job} to {_nodes(names)}" for job, names in zip(fact.jobs, fact.places, strict=False))
    lost, gained = _hours(fact.lost_gpu_seconds), _hours(fact.gained_gpu_seconds)
    match fact.refusal:
        case MoveRefusal.OFF:
            return "enough GPUs are free, but not together; no job is moved, because consolidation is off (ORCH_CONSOLIDATE=yes)"
        case MoveRefusal.BUSY:
            return "enough GPUs are free, but not together; no job is moved while others are stopping or moving"
        case MoveRefusal.NO_PLACE:
            return "enough GPUs are free, but not together; no jobs that may be moved have a place elsewhere so that it fits"
        case MoveRefusal.TOO_DEAR:
            return f"it would fit with {targets}; they do not move: they would lose {lost} at most, and it would gain {gained}"
        case None:
            when = "" if fact.wait_until is None else f", after the checkpoint expected by {_clock(fact.wait_until)}"
            return f"it fits with {targets}: they move{when}, lose {lost} at most, and it gains {gained}"


def _nodes(names: tuple[str, ...]) -> str:
    return f"{'node' if len(names) == 1 else 'nodes'} {', '.join(names)}"


def _hours(gpu_seconds: float) -> str:
    hours = gpu_seconds / 3600
    return f"{hours:.2g} GPU hours" if hours < 10 else f"{hours:.0f} GPU hours"


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"
