"""The loss of an epoch under way, on one rank.

`add` is on the hot path. On a GPU the sum stays there, so that adding waits for nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from orchestrator.train.trainer.engine.trainer import StepResult


class EpochLoss:
    """The sum of all samples' losses, to which a loss that is not finite adds nothing."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu: Tensor | None = torch.zeros((), device=device) if device.type == "cuda" else None
        self._sum = 0.0
        self._samples = 0

    def add(self, result: StepResult) -> None:
        """Add an optimizer step."""
        if self._on_gpu is None:
            loss = result.loss.item() if result.value is None else result.value
            if math.isfinite(loss):
                self._sum += loss * result.samples
                self._samples += result.samples
        else:
            self._on_gpu.add_(result.loss.nan_to_num(0.0, 0.0, 0.0), alpha=result.samples)
            self._samples += result.samples

    def sums(self) -> tuple[float, int]:
        """Return the sum of losses over samples, and the samples, since `start`. Waits for the device."""
        return self._sum if self._on_gpu is None else float(self._on_gpu), self._samples

    def start(self, loss_sum: float = 0.0, samples: int = 0) -> None:
        """Begin an epoch, or continue with the sums of a checkpoint."""
        self._samples = samples
        if self._on_gpu is None:
            self._sum = loss_sum
        else:
            self._on_gpu.fill_(loss_sum)
