"""What a checkpoint directory holds, as values, and which of it retention removes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEEP_BROKEN = 2  # quarantined checkpoints kept for a look at what happened


class CheckpointStatus(StrEnum):
    """Whether a checkpoint counts."""

    COMPLETE = "complete"
    BROKEN = "broken"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One entry of a checkpoint directory. ``bytes`` is what its manifest says; ``why`` explains a bad status."""

    name: str
    path: str
    step: int
    attempt: int
    status: CheckpointStatus
    why: str = ""
    bytes: int = 0
    created_at: float | None = None
    world_size: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        """The newest checkpoint has the highest: a newer attempt's line of work wins over a higher step."""
        return self.attempt, self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What to keep: the ``keep`` newest (None: all), and the best one by ``score_attribute`` (``max`` or ``min``)."""

    keep: int | None = 3
    score_attribute: str | None = None
    score_order: str = "max"

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}: the last good checkpoint is never removed; use 1 or more")
        if self.score_order not in ("max", "min"):
            raise ValueError(f"score_order is {self.score_order!r}; use 'max' or 'min'")


def removable(infos: Sequence[CheckpointInfo], retention: Retention) -> tuple[CheckpointInfo, ...]:
    """Which complete checkpoints go, oldest first. Never all of them."""
    complete = sorted((info for info in infos if info.status is CheckpointStatus.COMPLETE), key=lambda info: info.order)
    if retention.keep is None:
        return ()
    kept = {info.name for info in complete[-retention.keep :]}
    best = best_by_score(complete, retention)
    if best is not None:
        kept.add(best.name)
    return tuple(info for info in complete if info.name not in kept)


def best_by_score(infos: Sequence[CheckpointInfo], retention: Retention) -> CheckpointInfo | None:
    """The best complete checkpoint that has a finite score; of equal ones the newest."""
    if retention.score_attribute is None:
        return None
    sign = 1.0 if retention.score_order == "max" else -1.0
    scored = [
        (sign * info.metrics[retention.score_attribute], info.order, info)
        for info in infos
        if info.status is CheckpointStatus.COMPLETE
        and math.isfinite(info.metrics.get(retention.score_attribute, math.nan))
    ]
    return max(scored, key=lambda item: item[:2])[2] if scored else None


def removable_broken(infos: Sequence[CheckpointInfo]) -> tuple[CheckpointInfo, ...]:
    """Quarantined checkpoints that are not worth their space any more."""
    broken = sorted(
        (info for info in infos if info.status is CheckpointStatus.BROKEN),
        key=lambda info: (info.order, info.name),
    )
    return tuple(broken[:-KEEP_BROKEN])
