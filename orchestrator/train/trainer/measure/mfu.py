"""Model FLOPs utilization: which share of the device's peak a training run makes use of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.train.trainer.data.batches import compute_loss, count
from orchestrator.train.trainer.measure.flops import count_flops, device_peak

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
