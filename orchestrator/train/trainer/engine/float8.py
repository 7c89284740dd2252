"""Linear layers whose matrix products run in 8 bits: e4m3 forward, e5m2 for the gradients, scaled for each tensor.

Weights, their gradients, all other values and the names in the state dictionary are unchanged. Layers and batches of
sizes that the hardware does not support (no multiple of 16) compute as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_MULTIPLE = 16
_TINY = 1e-12


def use_float8(model: nn.Module) -> int:
    """Turn every suitable nn.Linear inside `model` (in place) into a Float8Linear; return how many there were."""
    converted = 0
    for module in model.modules():
        fits = type(module) is nn.Linear and module.in_features % _MULTIPLE == 0 == module.out_features % _MULTIPLE
        if fits:
            module.__class__ = Float8Linear  # the parameters stay the same objects, in optimizers as in checkpoints
            converted += 1
    return converted


class Float8Linear(nn.Linear):
    """nn.Linear with 8-bit matrix products under autocast: (..., in_features) -> (..., out_features)."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (nn.Linear's name for it)
        """Multiply in 8 bits where the number of rows allows it."""
        rows = input.numel() // self.in_features
        if rows % _MULTIPLE or not torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        dtype = torch.get_autocast_dtype(input.device.type)
        flat = input.reshape(rows, self.in_features).to(dtype)
        product: Tensor = _Float8Product.apply(flat, self.weight)  # type: ignore[no-untyped-call]  # untyped in torch
        if self.bias is not None:
            product = product + self.bias.to(dtype)
        return product.reshape(*input.shape[:-1], self.out_features)


class _Float8Product(torch.autograd.Function):
    """rows @ weight.T in 8 bits, and both of its gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        small_rows, rows_scale = _quantize(rows, torch.float8_e4m3fn)
        small_weight, weight_scale = _quantize(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(small_rows, rows_scale, small_weight, weight_scale)
        ctx.weight_dtype = weight.dtype
        return _product(small_rows, small_weight.t(), rows_scale, weight_scale, rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        small_rows, rows_scale, small_weight, weight_scale = ctx.saved_tensors
        small, scale = _quantize(gradient, torch.float8_e5m2)
        by_rows = _product(small, _by_column(small_weight), scale, weight_scale, gradient.dtype)
        by_weight = _product(small.t().contiguous(), _by_column(small_rows), scale, rows_scale, gradient.dtype)
        return by_rows, by_weight.to(ctx.weight_dtype)


def _quantize(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `values` scaled to fill the range of `dtype`, and the factor (a 0-dimensional fp32 tensor) that undoes it."""
    largest = torch.finfo(dtype).max
    inverse = values.abs().amax().float().clamp(min=_TINY) / largest
    return (values.float() / inverse).clamp(-largest, largest).to(dtype), inverse


def _by_column(matrix: Tensor) -> Tensor:
    """Return the same matrix in column-major layout, as required for the second factor."""
    return matrix.t().contiguous().t()


def _product(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype)  # noqa: SLF001 - torch has no public function for it
