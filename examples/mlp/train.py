"""Train one of the benchmark's two multi-layer perceptrons with the training system.

    orch submit job.yaml
    torchrun --nproc-per-node 2 train.py --model large
    python train.py --model medium --use-mixed-precision

All settings of the training system are options (docs/training.md), for example --batch-size, --sync-bn, --compile.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager

INPUTS, OUTPUTS = 50, 3
WIDTHS = {"medium": (256, 128, 64), "large": (1024, 1024, 512, 512, 256)}
DROPOUT = {"medium": 0.2, "large": 0.3}
PARAMETERS = {"medium": 54_403, "large": 2_021_379}


def mlp(name: str) -> nn.Sequential:
    """Return the `medium` model (54,403 parameters) or the `large` one (2,021,379): (n, 50) -> (n, 3)."""
    layers: list[nn.Module] = []
    before = INPUTS
    for width in WIDTHS[name]:
        layers += [nn.Linear(before, width), nn.ReLU(), nn.Dropout(DROPOUT[name])]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, OUTPUTS))


def samples(count: int) -> tuple[Tensor, Tensor]:
    """Return fifty features, some of them correlated, and three targets that can be learned from them."""
    generator = torch.Generator().manual_seed(42)
    features = torch.randn(count, INPUTS, generator=generator)
    features[:, 1] = 0.7 * features[:, 0] + 0.3 * features[:, 1]
    features[:, 2] = 0.5 * features[:, 0] - 0.3 * features[:, 1] + 0.4 * features[:, 2]
    mixing = torch.randn(INPUTS, OUTPUTS, generator=generator) / INPUTS**0.5
    noise = 0.1 * torch.randn(count, OUTPUTS, generator=generator)
    return features, torch.tanh(features @ mixing) + noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WIDTHS, default="medium")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=10_000)
    args, settings = parser.parse_known_args()

    with MultiGPUTrainingManager(MultiGPUConfig.from_args(settings, batch_size=64)) as manager:
        inputs, targets = samples(args.samples)
        held_out = args.samples // 10
        manager.setup_training(
            mlp(args.model),
            TensorDataset(inputs[held_out:], targets[held_out:]),
            TensorDataset(inputs[:held_out], targets[:held_out]),
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        )
        result = manager.fit(args.epochs)
        if manager.place.is_main:
            print(manager.comparison_report({args.model: result}))


if __name__ == "__main__":
    main()
