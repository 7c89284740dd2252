"""The workload of ``benchmarks.idle``: ranks that sleep through their steps and report each one.

usage: sleeping.py STEPS SECONDS_PER_STEP
"""

from __future__ import annotations

import sys
import time

from orchestrator.train import context


def main(steps: int, seconds_per_step: float) -> None:
    """Report ``steps`` steps."""
    training = context()
    for step in range(1, steps + 1):
        time.sleep(seconds_per_step)
        training.report(step=step, total_steps=steps, loss=1.0 / step)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
