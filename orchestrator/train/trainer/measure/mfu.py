"""Model FLOPs utilization: which share of the device's peak a training run makes use of.

Operations are counted by running the model once more on torch's meta device: no numbers are computed, no random numbers
drawn, no buffer of the real model is touched. A model whose control flow needs real numbers cannot be counted: None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestrator.train.trainer.data.batches import compute_loss, count, map_tensors
from orchestrator.train.trainer.measure.peaks import peak_flops

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.train.trainer.engine.trainer import MultiGPUTrainer


class MfuMeter:
    """Holds the device's peak and the operations of a sample: the configured number, else counted once with a batch."""

    def __init__(self, trainer: MultiGPUTrainer) -> None:
        config = trainer.config
        self._trainer = trainer
        self._peak = config.peak_flops or device_peak(trainer.place.device, trainer.precision.name)
        self._flops_per_sample = config.flops_per_sample
        self._counted = config.flops_per_sample is not None

    def learn(self, batch: Any) -> None:
        """Count the operations of one sample, once, if MFU can be computed at all."""
        if self._counted or self._peak is None:
            return
        self._counted = True
        trainer = self._trainer
        if trainer.shards_parameters:
            return

        def loss(model: torch.nn.Module, inputs: Any) -> Tensor:
            return compute_loss(model, inputs, trainer.loss_fn)[0]

        flops = count_flops(trainer.module, batch, loss)
        self._flops_per_sample = None if flops is None else flops / count(batch)[0]

    def of(self, samples_per_second: float) -> float | None:
        """Return the MFU at this rank's rate; None where the peak or the operations are unknown."""
        if not self._peak or not self._flops_per_sample:
            return None
        return samples_per_second * self._flops_per_sample / self._peak


class _Bound(nn.Module):
    """A model and a loss as one module, so that `functional_call` can replace the model's tensors."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


def count_flops(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]) -> float | None:
    """Return the FLOP of one forward and backward pass over `batch`; None where that requires real numbers.

    `loss` maps model and batch to a scalar. A multiplication and an addition are two operations. Operations without a
    formula in torch's counter (normalization, activations) count as zero, as is usual for MFU.
    """
    from torch.utils.flop_counter import FlopCounterMode

    bound = _Bound(model, loss)
    stand_ins = {name: _stand_in(tensor) for name, tensor in (*bound.named_parameters(), *bound.named_buffers())}
    try:
        with torch.enable_grad(), FlopCounterMode(display=False) as counter:
            output = torch.func.functional_call(bound, stand_ins, (map_tensors(batch, _stand_in),), strict=False)
            output.backward()
    except (RuntimeError, NotImplementedError, ValueError, TypeError):  # meta tensors have no values
        return None
    return float(counter.get_total_flops()) or None


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def device_peak(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of `device` in `precision`; None for CPUs and unknown GPUs."""
    if device.type != "cuda":
        return None
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    return peak_flops(torch.cuda.get_device_name(device), precision)
