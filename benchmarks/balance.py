"""Measures ``balance: measured`` with one of two ranks at half speed: samples per second as a share of what the ranks can do.

The second rank makes every forward and backward pass twice. With equal shares both are as fast as the slower one. The ideal
is therefore half of the throughput with both at full speed, which is the faster rank's, plus half of that with equal shares, which is
the slower one's. All times are processor time, so that other work of the machine does not count: a step lasts as long as its slowest
rank computes. Trainings take turns in the same processes.

    python -m benchmarks.balance --json benchmarks/results/$(date +%F)-balance.json
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import contenders
from benchmarks.measure import parser, report, result
from benchmarks.trainer_overhead import paired_ratio

WORKLOAD = contenders.ROOT / "benchmarks" / "workloads" / "balance_steps.py"
TARGET = 0.9


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=10)
    options.add_argument("--steps", type=int, default=15, help="steps of a turn that count (default 15)")
    arguments = options.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="orch-bench-"))
    target = directory / "result.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(WORKLOAD)]
    try:
        subprocess.run(
            [*launcher, str(target), str(arguments.pairs), str(arguments.steps)],
            env=contenders.ENVIRONMENT,
            cwd=directory,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found = json.loads(target.read_text())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    ideal = [(fast + slow) / 2 for fast, slow in zip(found["both_at_full_speed"], found["equal"], strict=True)]
    peers = {"ideal": ideal, "equal": found["equal"]}
    made = result(
        "balance",
        "samples per second of processor time",
        "higher",
        found["measured"],
        peers,
        raw=found,
        equal_share_of_ideal=sum(found["equal"]) / sum(ideal),
    )
    made["ratio"] = {name: paired_ratio(found["measured"], theirs) for name, theirs in peers.items()}
    report({**made, "target_met": made["ratio"]["ideal"]["low"] >= TARGET}, arguments.json)


if __name__ == "__main__":
    main()
