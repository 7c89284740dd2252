"""Small models and data for the tests of the training system, and one process's manager over a checkpoint directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from orchestrator.train.script.environment import RankEnvironment
from orchestrator.train.script.training_context import Context
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager
from orchestrator.train.trainer.process_group import RankGroup


def alone() -> RankGroup:
    return RankGroup(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))


def a_context(directory: Path) -> Context:
    return Context(RankEnvironment(checkpoint_dir=str(directory), device="cpu"))


def a_model(seed: int = 0, *, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def a_dataset(samples: int = 64, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float(), targets)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).float().mean()


def a_manager(directory: Path, **settings: Any) -> MultiGPUTrainingManager:
    config = MultiGPUConfig(**{"batch_size": 8, "progress_bar": False, **settings})
    return MultiGPUTrainingManager(config, ctx=a_context(directory))


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
