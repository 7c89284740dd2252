"""Behaviour on a GPU that a CPU can test: skips that the device decides, and events that it records."""

from __future__ import annotations

import pytest
import torch

from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.engine.trainer import DistributedDataParallelTrainer
from orchestrator.train.trainer.measure.metrics import MetricsCollector
from tests.unit.train.trainer.builders import a_model, alone, cross_entropy, equal, weights


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimizer_skips_by_itself_what_the_device_calls_bad(kind: type[torch.optim.Optimizer]) -> None:
    """The protocol is GradScaler's; torch supports it on CPUs, too."""
    trainer = DistributedDataParallelTrainer(MultiGPUConfig(max_nonfinite_steps=1), alone())
    model = a_model()
    trainer.prepare(model, loss_fn=cross_entropy, optimizer=lambda ours: kind(ours, lr=0.1, fused=True))  # type: ignore[call-arg]
    assert trainer._skips_on_device
    cross_entropy(model(torch.randn(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
    before = weights(model)
    trainer._step_unless(torch.tensor(1.0))
    trainer._step_unless(torch.tensor(1.0))
    assert equal(weights(model), before)
    metrics = MetricsCollector(trainer)
    assert metrics.late_streak() == 2
    trainer._step_unless(torch.tensor(0.0))
    assert not equal(weights(model), before)
    assert metrics.late_streak() == 0
    assert not hasattr(trainer.optimizer, "found_inf")
