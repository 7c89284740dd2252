"""Ray Train V2 running the workload: a whole process, as its user starts it.

usage: ray_train.py LEDGER STEPS SECONDS_PER_STEP SAVE_EVERY
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def train_loop(config: dict[str, Any]) -> None:
    """Run the workload in each of Ray Train's workers."""
    sys.path.insert(0, config["root"])
    from benchmarks.workloads.steps import main

    main(config["ledger"], config["steps"], config["seconds_per_step"], config["save_every"])


def run(ledger: str, steps: int, seconds_per_step: float, save_every: int) -> None:
    """Fit, with as many restarts as it takes."""
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    config = {
        "ledger": ledger,
        "steps": steps,
        "seconds_per_step": seconds_per_step,
        "save_every": save_every,
        "root": str(Path(__file__).parents[2]),
    }
    TorchTrainer(
        train_loop,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(
            name="peer", storage_path=str(Path(ledger).parent / "ray"), failure_config=FailureConfig(max_failures=100)
        ),
    ).fit()


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
