"""Figures of training: losses of an epoch, numbers that arrive late, and MFU."""

from __future__ import annotations

import math

import pytest
import torch

from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.engine.trainer import DistributedDataParallelTrainer, StepResult
from orchestrator.train.trainer.measure import metrics
from orchestrator.train.trainer.measure.metrics import EpochLoss, LateNumber, MfuMeter
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


def step(loss: float, samples: int, value: float | None = None) -> StepResult:
    return StepResult(torch.tensor(loss), samples, tokens=0, updated=True, skipped=False, grad_norm=None, value=value)


def test_losses_are_summed_over_samples() -> None:
    epoch = EpochLoss(torch.device("cpu"))
    epoch.add(step(2.0, 3))
    epoch.add(step(0.0, 1, value=4.0))  # a value that was read already is not read again
    assert epoch.sums() == (10.0, 4)


def test_a_loss_that_is_not_finite_adds_nothing() -> None:
    epoch = EpochLoss(torch.device("cpu"))
    for bad in (math.nan, math.inf, -math.inf):
        epoch.add(step(bad, 3))
    assert epoch.sums() == (0.0, 0)


def test_an_epoch_begins_anew_or_continues_with_the_sums_of_a_checkpoint() -> None:
    epoch = EpochLoss(torch.device("cpu"))
    epoch.add(step(2.0, 3))
    epoch.start(5.0, 2)
    epoch.add(step(1.0, 1))
    assert epoch.sums() == (6.0, 3)
    epoch.start()
    assert epoch.sums() == (0.0, 0)


def test_on_a_cpu_the_number_is_there_at_once() -> None:
    assert LateNumber().read(torch.tensor(2.5)) == 2.5


class Number:
    """A number on a GPU; its copy to the host begins when it is requested."""

    def __init__(self, value: float) -> None:
        self.device = torch.device("cuda")
        self.value = value

    def detach(self) -> Number:
        return self

    def reshape(self, _shape: tuple[()]) -> torch.Tensor:
        return torch.tensor(self.value)


class Event:
    """An event that the device has reached once the test sets it."""

    reached = False

    def record(self) -> None:
        Event.reached = False

    def query(self) -> bool:
        return Event.reached


def test_on_a_gpu_the_newest_number_that_has_arrived_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    empty = torch.empty
    monkeypatch.setattr(metrics.torch, "empty", lambda *shape, **options: empty(*shape, dtype=options["dtype"]))
    number = LateNumber()

    def read(value: float) -> float | None:
        return number.read(Number(value))  # type: ignore[arg-type]

    assert read(1.0) is None
    assert read(2.0) is None, "the first has not arrived"
    Event.reached = True
    assert read(3.0) == 1.0
    assert read(4.0) == 1.0
    Event.reached = True
    assert read(5.0) == 3.0, "what was asked for meanwhile is skipped"
