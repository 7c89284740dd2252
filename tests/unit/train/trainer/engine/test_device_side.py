"""Behaviour on a GPU that a CPU can test: skips that the device decides, and events that it records."""

from __future__ import annotations

import pytest
import torch

from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.engine import step_clock as clock
from orchestrator.train.trainer.engine.step_clock import EVERY, CudaClock, Part
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


class Event:
    """An event of a device that needs one millisecond for each; the first ``finished`` events are done."""

    passed = 0
    finished = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.passed += 1
        self.number = Event.passed

    def query(self) -> bool:
        return self.number <= Event.finished

    def elapsed_time(self, later: Event) -> float:
        return float(later.number - self.number)


def test_events_are_read_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.torch.cuda, "Event", Event)
    device = CudaClock()
    parts = (Part.DATA, Part.FORWARD, Part.BACKWARD, Part.FORWARD, Part.OPTIMIZER)
    for _ in range(2 * EVERY):
        device.begin()
        for part in parts:
            device.mark(part)
        device.end()
    assert Event.passed == 2 * 6, "one step of EVERY is measured"
    assert device.take() == {}, "the device has not come there yet"
    Event.finished = 6
    assert device.take() == {Part.DATA: 0.001, Part.FORWARD: 0.002, Part.BACKWARD: 0.001, Part.OPTIMIZER: 0.001}
    Event.finished = 12
    assert device.take()[Part.FORWARD] == 0.002
    assert device.take() == {}
