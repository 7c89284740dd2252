"""Share of the time that moved training forward while ranks are killed: the same seeded list of faults for every contender.

Faults come as a Poisson process, 60 s apart in the mean; each is SIGKILL of one rank. Goodput is the number of steps
done, each counted once, times the median step time, over the time since the first step. Start-up is not in it: that is
start_latency. A pair is one list of faults; contenders run one after the other, each for ``--seconds``. The grid runs
the same list on jobs that differ in ``checkpoint.interval`` only, all at once: ``auto`` should be near the best one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks import contenders
from benchmarks.measure import interleave, parser, ratio, report, result, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STEPS = 1_000_000
SECONDS_PER_STEP = 0.05
INTERVALS = ("1", "10", "100", "1000", "auto")


@dataclass(frozen=True, slots=True)
class Fault:
    """Time at which a rank is killed, in seconds after the first step, and the rank."""

    at_seconds: float
    rank: int


def fault_list(seed: int, seconds: float, mean_seconds: float) -> list[Fault]:
    """Return the faults of one pair; none in the last five seconds, so that each has its consequence."""
    dice = random.Random(seed)
    faults, at = [], dice.expovariate(1 / mean_seconds)
    while at < seconds - 5:
        faults.append(Fault(at, dice.randrange(2)))
        at += dice.expovariate(1 / mean_seconds)
    return faults


def goodput_under(runs: Mapping[str, contenders.Run], faults: list[Fault], seconds: float) -> dict[str, float]:
    """Let the runs train, kill a rank of each at every fault, and return the productive share of the time of each."""
    for run in runs.values():
        run.first_step_seconds()
    began = time.monotonic()
    from_step = {name: run.steps()[-1].number for name, run in runs.items()}
    for fault in faults:
        time.sleep(max(0.0, began + fault.at_seconds - time.monotonic()))
        for run in runs.values():
            with contextlib.suppress(ProcessLookupError):  # still recovering from the fault before
                os.kill(contenders.worker_pids(run.ledger)[fault.rank], signal.SIGKILL)
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    ended = time.monotonic()
    return {name: _goodput(run, from_step[name], began, ended) for name, run in runs.items()}


def _goodput(run: contenders.Run, from_step: int, began: float, ended: float) -> float:
    steps = [s for s in run.steps() if began <= s.at_seconds <= ended]
    times = [b.at_seconds - a.at_seconds for a, b in itertools.pairwise(steps) if a.pid == b.pid]
    return (max(s.number for s in steps) - from_step) * statistics.median(times) / (ended - began)


def _grid(orch: contenders.Orch, faults: list[Fault], seconds: float) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        runs = {
            interval: stack.enter_context(
                orch.submit(
                    STEPS, SECONDS_PER_STEP, workload="saving.py", cpus=0.1, checkpoint=f"{{interval: {interval}}}"
                )
            )
            for interval in INTERVALS
        }
        return goodput_under(runs, faults, seconds)


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=1)
    options.add_argument("--seconds", type=float, default=300.0, help="of training, per contender and pair")
    options.add_argument("--mean", type=float, default=60.0, help="mean seconds between faults")
    options.add_argument("--peers", default="torchrun,ray_train", help="which peers, by comma; empty for none")
    arguments = options.parse_args()
    orch = contenders.Orch()
    orch.up()
    done = {"ours": 0, "torchrun": 0, "ray_train": 0}
    starts: dict[str, Callable[[], contenders.Run]] = {
        "ours": lambda: orch.submit(STEPS, SECONDS_PER_STEP),
        "torchrun": lambda: contenders.torchrun(STEPS, SECONDS_PER_STEP),
        "ray_train": lambda: contenders.ray_train(STEPS, SECONDS_PER_STEP),
    }

    def arm(name: str) -> Callable[[], float]:
        def once() -> float:
            faults = fault_list(done[name], arguments.seconds, arguments.mean)
            done[name] += 1
            with starts[name]() as run:
                return goodput_under({name: run}, faults, arguments.seconds)[name]

        return once

    try:
        peers = [name for name in arguments.peers.split(",") if name]
        found = interleave({name: arm(name) for name in ("ours", *peers)}, arguments.pairs, warm_up=0)
        lists = [fault_list(seed, arguments.seconds, arguments.mean) for seed in range(arguments.pairs)]
        grids = [_grid(orch, faults, arguments.seconds) for faults in lists]
    finally:
        orch.close()
    values = dict(found.values)
    by_interval = {interval: [grid[interval] for grid in grids] for interval in INTERVALS}
    best = max((i for i in INTERVALS if i != "auto"), key=lambda i: statistics.median(by_interval[i]))
    report(
        result(
            "goodput",
            "share of the time",
            "higher",
            values.pop("ours"),
            values,
            failures=found.failures,
            faults=[len(faults) for faults in lists],
            seconds=arguments.seconds,
            mean_seconds_between_faults=arguments.mean,
            by_interval={interval: summary(shares) for interval, shares in by_interval.items()},
            auto_to_best={"best": best, **ratio(by_interval["auto"], by_interval[best])},
        ),
        arguments.json,
    )


if __name__ == "__main__":
    main()
