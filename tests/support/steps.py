"""A job that steps at a pace, and keeps its processor busy for a share of it: no torch, no data. Runs under orch.

usage: steps.py --busy 0.3 [--slow-rank N] [--save] [--fail-after N] [--steps N]
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from orchestrator.train import context

PERIOD_SECONDS = 0.1
SLOWER = 6


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--busy", type=float, default=0.02)
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--fail-after", type=int)
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args()

    # One processor for all ranks: other programs of this machine then delay all ranks alike.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    ctx = context()
    found = ctx.load() if args.save else None
    step = found.step if found else 0
    period = PERIOD_SECONDS * (SLOWER if ctx.rank == args.slow_rank else 1)
    while step < args.steps and not ctx.should_stop():
        began = time.perf_counter()
        while time.perf_counter() - began < PERIOD_SECONDS * args.busy:
            pass
        time.sleep(max(0.0, began + period - time.perf_counter()))
        step += 1
        ctx.report(
            step=step, total_steps=args.steps, samples=32 * step, tokens=4096 * step,
            loss=1.0 / step, accuracy=0.5, mfu=0.4,
        )  # fmt: skip
        if args.fail_after and step >= args.fail_after:
            return 1
        if args.save and ctx.should_save(step):
            ctx.save({"step": step}, step=step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
