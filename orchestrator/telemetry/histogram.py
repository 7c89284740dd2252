"""Histograms of durations, in the catalogue's buckets; written by the daemon, read at scrape time."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.catalogue import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """A histogram at a moment: (upper bound, number of values up to it), `+Inf` last, and the sum of all values."""

    buckets: tuple[tuple[str, int], ...]
    total: float


class Histogram:
    """Counts values of one series of a histogram metric. Not thread-safe: the daemon's loop owns it."""

    def __init__(self, metric: Metric) -> None:
        if metric.type != "histogram":
            raise ValueError(f"{metric.name} is a {metric.type}: only histograms have buckets, see catalogue.py")
        self._bounds = metric.buckets
        self._counts = [0] * (len(metric.buckets) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value, in the metric's unit."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def counts(self) -> Counts:
        """Return the counts so far."""
        so_far, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        return Counts(buckets=tuple(buckets), total=self._total)
