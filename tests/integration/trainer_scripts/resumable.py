"""Training that a test kills, stops or fails: `resumable.py OUT [--fail KIND]` writes rank 0's weights at its end."""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager
from tests.integration.trainer_ranks import cross_entropy, momentum

EPOCHS = 4
SAMPLES = 96


class Samples(Dataset[Any]):
    """Samples that take `pause` seconds each; with `fail` "data", rank 1 cannot read them."""

    def __init__(self, *, fail: str, rank: int, pause: float) -> None:
        self.fail, self.rank, self.pause = fail, rank, pause

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.fail == "data" and self.rank == 1:
            raise OSError(f"image-{index}.png is truncated")
        time.sleep(self.pause)
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(8, generator=generator) + 0.1 * torch.randn(
            8
        )  # augmented: the rank's random numbers matter
        return inputs, torch.tensor(index % 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--fail", default="")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--recovery-timeout", type=float, default=60.0)
    args = parser.parse_args()
    config = MultiGPUConfig(
        batch_size=0 if args.fail == "config" else 4,
        checkpoint_frequency=5,
        recovery_timeout=timedelta(seconds=args.recovery_timeout),
        progress_bar=False,
    )
    torch.manual_seed(0)
    with MultiGPUTrainingManager(config) as manager:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        torch.manual_seed(manager.place.rank)
        data = Samples(fail=args.fail, rank=manager.place.rank, pause=args.pause)
        manager.setup_training(model, data, loss_fn=None if args.fail == "model" else cross_entropy, optimizer=momentum)
        result = manager.fit(EPOCHS)
        if manager.place.is_main:
            torch.save({"state": model.state_dict(), "losses": [entry["loss"] for entry in result.history]}, args.out)


if __name__ == "__main__":
    main()
