"""A training that computes the same in each run: `exact.py FINAL PRECISION [--backend B]` writes its weights at the end."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # makes cuBLAS sum in the same order each time
EPOCHS, SAMPLES, BATCH, WIDTH = 10, 1024, 32, 256


class Samples(Dataset[Any]):
    """A slow data set, so that a test can kill the training halfway."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.0003)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.tensor(index % 10)


def main() -> None:
    """Train on the GPU, with dropout: the device's random numbers matter."""
    parser = argparse.ArgumentParser()
    parser.add_argument("final", type=Path)
    parser.add_argument("precision")
    parser.add_argument("--backend")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    config = MultiGPUConfig(
        batch_size=BATCH,
        precision=options.precision,
        backend=options.backend,
        checkpoint_frequency=10,
        progress_bar=False,
    )
    with MultiGPUTrainingManager(config) as manager:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Dropout(0.3), nn.Linear(1024, 10))
        manager.setup_training(
            model,
            Samples(),
            loss_fn=nn.functional.cross_entropy,
            optimizer=lambda ours: torch.optim.AdamW(ours, lr=1e-3),
        )
        result = manager.fit(EPOCHS)
        assert next(model.parameters()).is_cuda
        if manager.place.is_main:
            losses = [entry["loss"] for entry in result.history]
            scaler = manager.trainer.precision.scaler
            scale = scaler.get_scale() if scaler is not None else None
            torch.save({"model": model.state_dict(), "losses": losses, "scale": scale}, options.final)


if __name__ == "__main__":
    main()
