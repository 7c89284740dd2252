"""Batch normalization over the batches of all ranks, also on the CPU, where torch's SyncBatchNorm refuses to run.

The statistics are over all ranks' samples, each with the same weight, and the gradient flows through them across ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm


def synchronise(model: nn.Module, device: torch.device) -> nn.Module:
    """Return `model` with every batch normalization replaced by one over all ranks; parameters and buffers are unchanged."""
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    for module in model.modules():
        kind = _ON_CPU.get(type(module))
        if kind is not None:
            module.__class__ = kind
    return model


class _AllReduceSum(torch.autograd.Function):
    """Sum over ranks; its gradient is summed over ranks as well."""

    @staticmethod
    def forward(_ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def _normalize(module: _BatchNorm, values: Tensor) -> Tensor:
    """Normalize (n, channels, ...) with the mean and the variance over all ranks' samples."""
    if not module.training:
        return functional.batch_norm(
            values, module.running_mean, module.running_var, module.weight, module.bias, training=False, eps=module.eps
        )
    channels = values.shape[1]
    flat = values.float().transpose(0, 1).reshape(channels, -1)
    count = torch.full((1,), float(flat.shape[1]))
    sums: Tensor = _AllReduceSum.apply(torch.cat((flat.sum(dim=1), count)))  # type: ignore[no-untyped-call]  # untyped in torch
    samples = sums[-1].detach()
    mean = sums[:-1] / samples
    centred = flat - mean[:, None]  # the squares of the differences: squares minus squared mean would cancel
    variance: Tensor = _AllReduceSum.apply(centred.square().sum(dim=1)) / samples  # type: ignore[no-untyped-call]  # untyped in torch
    _remember(module, mean.detach(), variance.detach(), samples)
    result = centred * torch.rsqrt(variance + module.eps)[:, None]
    if module.weight is not None:
        result = result * module.weight[:, None] + module.bias[:, None]
    return result.reshape(channels, values.shape[0], *values.shape[2:]).transpose(0, 1).to(values.dtype)


def _remember(module: _BatchNorm, mean: Tensor, variance: Tensor, samples: Tensor) -> None:
    """Update the running statistics like torch's batch normalization: with the unbiased variance."""
    if module.running_mean is None or module.running_var is None or module.num_batches_tracked is None:
        return
    module.num_batches_tracked.add_(1)
    weight = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    module.running_mean.lerp_(mean, weight)
    module.running_var.lerp_(variance * samples / (samples - 1), weight)


class _SyncBatchNorm1d(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name for it)
        self._check_input_dim(input)
        return _normalize(self, input)


class _SyncBatchNorm2d(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's signature
        self._check_input_dim(input)
        return _normalize(self, input)


class _SyncBatchNorm3d(nn.BatchNorm3d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's signature
        self._check_input_dim(input)
        return _normalize(self, input)


_ON_CPU: dict[type, type] = {
    nn.BatchNorm1d: _SyncBatchNorm1d,
    nn.BatchNorm2d: _SyncBatchNorm2d,
    nn.BatchNorm3d: _SyncBatchNorm3d,
}
