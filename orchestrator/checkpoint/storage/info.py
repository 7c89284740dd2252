"""Entries of a checkpoint directory as values, and the choice of those that retention removes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from orchestrator.checkpoint.format.layout import Version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEEP_BROKEN = 2  # quarantined checkpoints kept for inspection


class CheckpointStatus(StrEnum):
    """Whether a checkpoint counts."""

    COMPLETE = "complete"
    BROKEN = "broken"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One entry of a checkpoint directory. ``bytes`` is from its manifest; ``why`` explains a bad status."""

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
    digest: str = ""  # of the content, where versions share a name

    @property
    def order(self) -> tuple[int, int]:
        """Sort key, highest for the newest checkpoint: a newer attempt takes precedence over a higher step."""
        return self.attempt, self.step

    @property
    def version(self) -> Version:
        """Attempt and step."""
        return Version(attempt=self.attempt, step=self.step)

    @property
    def is_complete(self) -> bool:
        """Whether it counts, as far as known without reading it."""
        return self.status is CheckpointStatus.COMPLETE


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Rule to keep the ``keep`` newest (None: all), and the ``keep_best`` best by ``score_attribute`` (``max`` or ``min``).

    ``keep_best`` None: as many as ``keep``.
    """

    keep: int | None = 3
    keep_best: int | None = None
    score_attribute: str | None = None
    score_order: str = "max"

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}: the last good checkpoint is never removed; use 1 or more")
        if self.keep_best is not None and self.keep_best < 1:
            raise ValueError(f"keep_best is {self.keep_best}; use 1 or more, or no score_attribute")
        if self.score_order not in ("max", "min"):
            raise ValueError(f"score_order is {self.score_order!r}; use 'max' or 'min'")

    @property
    def best_count(self) -> int | None:
        """Number of the best checkpoints that are kept; None: all."""
        return self.keep if self.keep_best is None else self.keep_best


def removable(infos: Sequence[CheckpointInfo], retention: Retention) -> tuple[CheckpointInfo, ...]:
    """Return the complete checkpoints to remove, oldest first. Never all of them."""
    complete = sorted((info for info in infos if info.status is CheckpointStatus.COMPLETE), key=lambda info: info.order)
    if retention.keep is None:
        return ()
    kept = {info.name for info in complete[-retention.keep :]}
    kept |= {info.name for info in best_infos(complete, retention)}
    return tuple(info for info in complete if info.name not in kept)


def best_by_score(infos: Sequence[CheckpointInfo], retention: Retention) -> CheckpointInfo | None:
    """Return the complete checkpoint with the best finite score; of equal ones the newest."""
    return next(iter(best_infos(infos, retention)), None)


def best_infos(infos: Sequence[CheckpointInfo], retention: Retention) -> tuple[CheckpointInfo, ...]:
    """Return the complete checkpoints with the best finite scores, the best first; of equal ones the newest."""
    if retention.score_attribute is None:
        return ()
    sign = 1.0 if retention.score_order == "max" else -1.0
    scored = [
        (sign * info.metrics[retention.score_attribute], info.order, info)
        for info in infos
        if info.status is CheckpointStatus.COMPLETE
        and math.isfinite(info.metrics.get(retention.score_attribute, math.nan))
    ]
    best = sorted(scored, key=lambda item: item[:2], reverse=True)
    count = retention.best_count
    return tuple(info for *_, info in (best if count is None else best[:count]))


def removable_broken(infos: Sequence[CheckpointInfo]) -> tuple[CheckpointInfo, ...]:
    """Return the quarantined checkpoints to remove."""
    broken = sorted(
        (info for info in infos if info.status is CheckpointStatus.BROKEN),
        key=lambda info: (info.order, info.name),
    )
    return tuple(broken[:-KEEP_BROKEN])
