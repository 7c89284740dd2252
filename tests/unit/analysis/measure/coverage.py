"""How often 95 % intervals hold the mean, by simulation: the table of docs/reports.md.

``python -m tests.unit.analysis.measure.coverage`` prints it; each value is a part of its neighbour, and chance.
"""

from __future__ import annotations

import sys

import numpy as np

from orchestrator.analysis.measure.intervals import mean_interval

COUNTS = (20, 30, 50, 100, 200, 500, 2000)
MEMORIES = (0.0, 0.3, 0.5, 0.8, 0.9, 0.95)
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


def main(runs: int) -> None:
    print(f"| values | {' | '.join(str(memory) for memory in MEMORIES)} |")
    print("|---" * (len(MEMORIES) + 1) + "|")
    for count in COUNTS:
        cells = [f"{100 * coverage(count, memory, runs):.1f} %" for memory in MEMORIES]
        print(f"| {count} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
