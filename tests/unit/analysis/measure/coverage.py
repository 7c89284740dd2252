"""How often 95 % intervals hold the mean, by simulation: each value is a part of its neighbour, and chance.

The table of docs/reports.md is that of ``benchmarks.analysis_figures``.
"""

from __future__ import annotations

import numpy as np

from orchestrator.analysis.measure.intervals import mean_interval

WARM_UP = 200


def sluggish(generator: np.random.Generator, count: int, memory: float) -> np.ndarray:
    """A series that has forgotten where it began; its mean is 0."""
    noise = generator.normal(size=WARM_UP + count)
    for place in range(1, WARM_UP + count):
        noise[place] += memory * noise[place - 1]
    return noise[WARM_UP:]


def coverage(count: int, memory: float, runs: int, seed: int = 20090331) -> float:
    """The share of intervals that hold the mean."""
    generator = np.random.default_rng(seed)
    held = 0
    for _ in range(runs):
        found = mean_interval(sluggish(generator, count, memory))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.0 <= found.high
    return held / runs
