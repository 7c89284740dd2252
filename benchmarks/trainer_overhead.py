"""Measures the cost of the training system in a step: against a loop written by hand, Lightning Fabric and Accelerate.

One process, and two ranks with DistributedDataParallel under torchrun; or, with --gpu, one process on a GPU; hooks of metrics, checkpoints and stop signals are on. All
contenders take turns in the same processes, so a pair is two turns a moment apart, and the ratio is the median of the
pairs' ratios with its 95 % bootstrap interval. A value is the mean step time of one turn.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import contenders
from benchmarks.measure import RESAMPLES, parser, report, result

if TYPE_CHECKING:
    from collections.abc import Sequence

WORKLOAD = contenders.ROOT / "benchmarks" / "workloads" / "trainer_steps.py"
PRECISIONS = ("fp32", "bf16", "fp16")
_SEED = 20_261_121


def main() -> None:
    """Measure and report one process, and two ranks."""
    options = parser(__doc__ or "", pairs=40)
    options.add_argument("--steps", type=int, default=100, help="optimizer steps in a turn (default 100)")
    options.add_argument("--gpu", action="store_true", help="one process on a GPU, in each precision")
    arguments = options.parse_args()
    cases = (
        [(1, "cuda", name) for name in PRECISIONS] if arguments.gpu else [(ranks, "cpu", "fp32") for ranks in (1, 2)]
    )
    first, *others = (measure(*case, arguments.pairs, arguments.steps) for case in cases)
    report({**first, "also": others if arguments.gpu else others[0]}, arguments.json)


def measure(ranks: int, device: str, precision: str, pairs: int, steps: int) -> dict[str, Any]:
    """Return the result for a number of ranks, on a device, in a precision."""
    directory = Path(tempfile.mkdtemp(prefix="orch-bench-"))
    target = directory / "result.json"
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    try:
        subprocess.run(
            [*launcher, str(WORKLOAD), str(target), str(pairs), str(steps), device, precision],
            env=contenders.ENVIRONMENT,
            cwd=directory,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found = json.loads(target.read_text())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    mine = found["seconds"].pop("ours")
    made = result(
        "trainer_overhead" if device == "cpu" else "trainer_overhead_gpu",
        "s per step",
        "lower",
        mine,
        found["seconds"],
        ranks=ranks,
        steps=steps,
        device=device,
        precision=precision,
        absent=found["absent"],
    )
    made["ratio"] = {name: paired_ratio(mine, theirs) for name, theirs in found["seconds"].items()}
    return made


def paired_ratio(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return the median of the pairs' ratios, with its 95 % bootstrap interval."""
    ratios = np.asarray(mine) / np.asarray(theirs)
    resampled = np.random.default_rng(_SEED).choice(ratios, size=(RESAMPLES, len(ratios)), replace=True)
    low, high = np.percentile(np.median(resampled, axis=1), [2.5, 97.5])
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}


if __name__ == "__main__":
    main()
