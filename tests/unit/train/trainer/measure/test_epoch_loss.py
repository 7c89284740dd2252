"""The loss of an epoch under way."""

from __future__ import annotations

import math

import torch

from orchestrator.train.trainer.engine.trainer import StepResult
from orchestrator.train.trainer.measure.metrics import EpochLoss


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
