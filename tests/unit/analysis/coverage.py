"""Simulated coverage of 95 % confidence intervals for the mean of an autoregressive series.

The table of docs/reports.md is that of ``benchmarks.analysis_figures``.
"""

from __future__ import annotations

import numpy as np

from orchestrator.analysis.statistics import mean_interval

WARM_UP = 200


def sluggish(generator: np.random.Generator, count: int, memory: float) -> np.ndarray:
    """Return an autoregressive series with mean 0, after a warm-up that removes the effect of its start."""
    noise = generator.normal(size=WARM_UP + count)
    for place in range(1, WARM_UP + count):
        noise[place] += memory * noise[place - 1]
    return noise[WARM_UP:]


def coverage(count: int, memory: float, runs: int, seed: int = 20090331) -> float:
    """Return the share of intervals that contain the mean."""
    generator = np.random.default_rng(seed)
    held = 0
    for _ in range(runs):
        found = mean_interval(sluggish(generator, count, memory))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.0 <= found.high
    return held / runs
