"""Model FLOPs utilization: the rate times a sample's work over the device's peak."""

from __future__ import annotations

import pytest
import torch

from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.engine.trainer import DistributedDataParallelTrainer
from orchestrator.train.trainer.measure.metrics import MfuMeter
from tests.unit.train.trainer.builders import a_model, alone, cross_entropy, sgd


def test_mfu_is_rate_times_work_over_peak() -> None:
    config = MultiGPUConfig(peak_flops=1e9, batch_size=4)
    trainer = DistributedDataParallelTrainer(config, alone())
    trainer.prepare(a_model(), loss_fn=cross_entropy, optimizer=sgd)
    meter = MfuMeter(trainer)
    batch = (torch.randn(4, 8), torch.zeros(4, dtype=torch.long))
    assert meter.of(100.0) is None, "nothing is known of a sample's work"
    meter.learn(batch)
    work = 2 * (8 * 16 + 16 * 3) * 3 - 2 * 8 * 16  # without the gradient of the inputs
    assert meter.of(100.0) == pytest.approx(100.0 * work / 1e9)


def test_given_flops_are_taken_at_their_word() -> None:
    trainer = DistributedDataParallelTrainer(MultiGPUConfig(peak_flops=1e9, flops_per_sample=500.0), alone())
    trainer.prepare(a_model(), loss_fn=cross_entropy, optimizer=sgd)
    meter = MfuMeter(trainer)
    meter.learn((torch.randn(4, 8), torch.zeros(4, dtype=torch.long)))
    assert meter.of(100.0) == pytest.approx(100.0 * 500 / 1e9)


def test_without_a_peak_there_is_no_mfu_and_nothing_is_counted() -> None:
    trainer = DistributedDataParallelTrainer(MultiGPUConfig(flops_per_sample=500.0), alone())
    trainer.prepare(a_model(), loss_fn=cross_entropy, optimizer=sgd)
    meter = MfuMeter(trainer)
    meter.learn(None)
    assert meter.of(100.0) is None
