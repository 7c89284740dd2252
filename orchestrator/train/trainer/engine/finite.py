"""Keeps NaN out of the weights: decides, equally on all ranks, whether an update may happen.

Each rank has its own loss; the gradient is reduced over all ranks. On the CPU reading a number is free: the loss is
checked before the backward pass, and a rank with a bad one sends NaN for every gradient, so that all ranks see it in
any one of them. On a GPU reading means waiting: there the norm of the reduced gradient decides, on the device itself
when the optimizer can skip an update there (the fused ones can).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestrator.train.trainer.data.batches import map_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.train.trainer.process_group import RankGroup


class FiniteGuard:
    """Counts consecutive skipped updates, and reports when there are too many.

    `sharded`: a rank sees only its part of the gradient. `may_poison`: a backward pass may use another graph than the
    forward pass did (not with a static graph, nor with a search for unused parameters).
    """

    def __init__(self, model: nn.Module, place: RankGroup, *, limit: int, sharded: bool, may_poison: bool) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._witness = min(self._parameters, key=Tensor.numel)
        on_cpu = place.device.type == "cpu" and not sharded
        self._shares = place.distributed
        self._looks = on_cpu and (may_poison or not self._shares)
        self._limit = limit
        self.streak_on_device: Tensor | None = None
        """The same as `streak`, where only the device counts."""
        self.value: float | None = None
        """The last checked loss; None where checking is not free."""
        self.bad_here = False
        """Whether a checked loss of this rank was not finite in this step."""
        self.streak = 0
        """Consecutive skipped updates that this process has counted."""
        self.skipped = 0
        """Updates skipped since the start that this process has counted."""

    @property
    def needs_norm(self) -> bool:
        """Whether the gradient's norm must be computed even without clipping."""
        return not self._looks

    @property
    def exhausted(self) -> bool:
        """Whether training must stop."""
        return self.streak > self._limit

    def begin(self) -> None:
        """Start a step."""
        self.bad_here = False

    def look(self, loss: Tensor) -> Tensor | None:
        """Return the tensor to call backward() on, or None. Where checking is free, a bad loss is detected here."""
        if not self._looks:
            return loss
        self.value = loss.item()
        if math.isfinite(self.value):
            return loss
        self.bad_here = True
        if not self._shares:
            return None
        return torch.stack([parameter.sum() for parameter in self._parameters]).sum() * math.nan

    def allows(self, norm: Tensor | None) -> bool | Tensor:
        """Return whether the update may happen: True or False, or a device's tensor (1.0 for no) that only a device should read.

        `norm` is that of the reduced gradient, where it is known. The answer is the same on all ranks.
        """
        if norm is not None:
            if norm.device.type != "cpu":
                return norm.isfinite().logical_not().float().reshape(())
            return math.isfinite(norm.item()) and not (self.bad_here and not self._shares)
        if not self._shares:
            return not self.bad_here
        gradient = self._witness.grad
        return gradient is None or math.isfinite(gradient.sum().item())

    def count(self, *, good: bool) -> None:
        """Record how a step ended."""
        self.streak = 0 if good else self.streak + 1
        self.skipped += not good

    def count_on_device(self, bad: Tensor) -> Tensor:
        """Record how a step ended without reading it; return the streak so far, on the device."""
        streak = bad if self.streak_on_device is None else (self.streak_on_device + 1) * bad
        self.streak_on_device = streak
        return streak


def describe_batches(batches: Sequence[Any]) -> str:
    """Return what is not finite in the inputs themselves; an empty text when they are fine."""
    bad: list[str] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and not tensor.isfinite().all():
            rows = (~tensor.isfinite()).reshape(tensor.shape[0] if tensor.dim() else 1, -1).any(dim=1).nonzero()
            bad.append(f"samples {[int(row) for row in rows.flatten()[:8]]} of a batch hold NaN or infinite inputs")
        return tensor

    for batch in batches:
        map_tensors(batch, look)
    return "; ".join(dict.fromkeys(bad))
