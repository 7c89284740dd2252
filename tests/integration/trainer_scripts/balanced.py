"""Training on two ranks with measured balance, up to STEPS or broken off after BREAK steps; by a clock that counts samples, rank 1 takes twice as long for a sample.

Writes weights, shares, and the samples of each forward pass into OUT-rank-R.pt.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from orchestrator.train.errors import StopTraining
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.engine.step_clock import BusyClock
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager
from tests.integration.trainer_ranks import cross_entropy, global_batches, linear_model, momentum


def main() -> None:
    out, steps, broken_off = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = MultiGPUConfig(
        batch_size=12, global_batch_size=24, balance="measured", checkpoint_frequency=6, progress_bar=False, seed=7
    )
    with MultiGPUTrainingManager(config) as manager:
        place, work, passes = manager.place, [0.0], []
        cost = 2.0 if place.rank else 1.0

        def count(_module: Any, inputs: Any) -> None:
            passes.append(len(inputs[0]))
            work[0] += cost * len(inputs[0])

        def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
            if manager.progress.step == broken_off:
                raise StopTraining(broken_off)
            return cross_entropy(outputs, targets)

        model = linear_model()
        model.register_forward_pre_hook(count)
        manager.trainer.clock = BusyClock(manager.trainer.clock, place.device, now=lambda: work[0])
        inputs, targets = global_batches(1, size=110)[0]
        manager.setup_training(model, TensorDataset(inputs, targets), loss_fn=loss_fn, optimizer=momentum)
        begun_with = list(manager.fault_tolerance.shares.portions)
        with contextlib.suppress(StopTraining):
            manager.fit(max_steps=steps)
        found = {
            "state": manager.trainer.model_state(),
            "begun_with": begun_with,
            "portions": list(manager.fault_tolerance.shares.portions),
            "passes": passes,
            "samples": manager.progress.samples,
        }
        torch.save(found, f"{out}-rank-{place.rank}.pt")


if __name__ == "__main__":
    main()
