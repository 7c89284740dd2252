"""Repeated kills, stops, freezes and terminations of every process that a job depends on, singly and in pairs.

Victims are a rank's training process, its keeper, its actor, the fork servers, the nodes' agents, the daemon, the raylets and Ray's control
store, on a node that orch starts itself or on a cluster of three. A fifth of the disturbances are what users, jobs and the machine do
(`abuses.py`): trees that nothing recursive removes, requests that are given up, a checkpoint whose writer dies twice, a full disk, a Ray that
does not answer. After each disturbance the job must make a new step; its own ledger
shows that no attempt ran beside another and that no step was left out. In the end it succeeds, and nothing is left. Memory, open files,
processes, and bytes in `/dev/shm`, in `/tmp` and below the home are measured at rest after each round: their growth is reported per thousand
recoveries. Several places, each with a daemon and Ray of its own, are disturbed at the same time: each waits most of its time. On a GPU, jobs keep their
state there: each step changes it, each attempt finds that of the checkpoint's step, and nothing of an ended job is left in the GPU's memory.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import measure
from benchmarks.disturbances.accounts import whole
from benchmarks.disturbances.campaign import one_place

if TYPE_CHECKING:
    import argparse

PER_ROUND: Final = 100  # disturbances of one job


def places(chosen: argparse.Namespace, count: int, seed: int) -> list[dict[str, Any]]:
    """Run a sitting in each requested place, all at the same time; each does its share of ``count``."""
    wanted = ["gpu" if chosen.gpu else "node"] * chosen.places + ["cluster"] * chosen.clusters
    share, more = divmod(count, len(wanted))
    with concurrent.futures.ProcessPoolExecutor(len(wanted), multiprocessing.get_context("spawn")) as pool:
        futures = [
            pool.submit(
                one_place,
                name,
                share + (number < more),
                chosen.seconds,
                seed + number,
                chosen.per_round,
                len(wanted) - 1,
            )
            for number, name in enumerate(wanted)
            if share + (number < more)
        ]
        return [future.result() for future in futures]


def main() -> int:
    """Run and report; return exit code 1 when a promise was broken. The report has the seed that repeats it."""
    options = measure.parser(str(__doc__).partition("\n")[0], 1)
    options.add_argument(
        "--disturbances",
        type=int,
        default=10_000,
        help="number of disturbances, those in FILE included (default: 10000)",
    )
    options.add_argument("--before", type=Path, metavar="FILE", help="a result that this call goes on from")
    options.add_argument("--seconds", type=float, default=float("inf"), help="end after this time (default: never)")
    options.add_argument("--places", type=int, default=1, help="homes of one node, at the same time (default: 1)")
    options.add_argument("--clusters", type=int, default=1, help="clusters of three nodes beside them (default: 1)")
    options.add_argument("--gpu", action="store_true", help="the places' jobs share this machine's first NVIDIA GPU")
    options.add_argument("--per-round", type=int, default=PER_ROUND, help="disturbances of one job (default: 100)")
    options.add_argument("--seed", type=int, default=20_261_124, help="of the first place; each later one adds 1")
    chosen = options.parse_args()
    if chosen.places + chosen.clusters < 1:
        options.error("there is nothing to disturb: ask for a place or a cluster")
    before = json.loads(chosen.before.read_text(encoding="utf-8"))["sittings"] if chosen.before else []
    left = chosen.disturbances - sum(each["recoveries"] for each in before)
    if left <= 0:
        print(f"{chosen.before} has {chosen.disturbances - left} recoveries already: ask for more with --disturbances")
        return 0
    new = places(chosen, left, chosen.seed + len(before))
    measure.report(whole([*before, *new]), chosen.json)
    return 1 if any(each["problems"] for each in new) else 0


if __name__ == "__main__":
    sys.exit(main())
