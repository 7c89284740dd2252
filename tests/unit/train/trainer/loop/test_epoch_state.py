"""An epoch under way: begun, counted, saved, and continued with the same batches and random numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.data.loading import Feed
from orchestrator.train.trainer.engine.trainer import DistributedDataParallelTrainer, StepResult
from orchestrator.train.trainer.loop.training_state import EpochState, Progress, random_state
from orchestrator.train.trainer.measure.metrics import EpochLoss
from tests.unit.train.trainer.builders import a_model, alone, cross_entropy, sgd

CPU = torch.device("cpu")
ACCUMULATE, BATCH = 2, 4
STEP = StepResult(torch.tensor(1.0), ACCUMULATE * BATCH, tokens=3, updated=True, skipped=False, grad_norm=None)


@pytest.fixture
def epoch() -> EpochState:
    config = MultiGPUConfig(batch_size=BATCH, gradient_accumulation_steps=ACCUMULATE)
    trainer = DistributedDataParallelTrainer(config, alone())
    trainer.prepare(a_model(), loss_fn=cross_entropy, optimizer=sgd)
    return EpochState(trainer)


def shuffled() -> Feed:
    """Return a user's own loader, which draws its order from the global generator."""
    return Feed(DataLoader(TensorDataset(torch.arange(32)), batch_size=BATCH, shuffle=True))


def test_a_step_counts_what_all_its_batches_used(epoch: EpochState) -> None:
    progress = Progress()
    epoch.advance(progress, STEP, ACCUMULATE)
    epoch.advance(progress, STEP, ACCUMULATE)
    assert epoch.used == 4
    assert (progress.step, progress.position, progress.samples, progress.tokens) == (2, 16, 16, 6)
    epoch.end(progress)
    assert (progress.epoch, progress.position, epoch.used, progress.step) == (1, 0, 0, 2)


def test_an_epoch_continues_with_the_batches_losses_and_random_numbers_that_were_next(epoch: EpochState) -> None:
    torch.manual_seed(3)
    progress, loss, feed = Progress(), EpochLoss(CPU), shuffled()
    batches = epoch.begin(feed, progress, loss)
    for _ in range(ACCUMULATE):
        next(batches)
    epoch.advance(progress, STEP, ACCUMULATE)
    loss.add(STEP)
    saved = epoch.saved(feed, loss) | {"random": random_state(CPU)}
    expected = [batch.tolist() for (batch,) in batches]
    number = torch.rand(())

    torch.manual_seed(4)
    again = EpochLoss(CPU)
    epoch.restore(saved)
    batches = epoch.begin(shuffled(), progress, again)
    assert torch.rand(()) == number
    assert [batch.tolist() for (batch,) in batches] == expected
    assert epoch.used == ACCUMULATE
    assert again.sums() == loss.sums() == (8.0, 8)


def test_what_is_restored_is_for_one_epoch_alone(epoch: EpochState) -> None:
    progress, loss = Progress(), EpochLoss(CPU)
    loss.add(STEP)
    epoch.restore(epoch.saved(None, loss) | {"random": random_state(CPU)})
    epoch.begin(shuffled(), progress, loss)
    assert loss.sums() == (8.0, 8)
    epoch.begin(shuffled(), progress, loss)
    assert loss.sums() == (0.0, 0)


def test_without_a_rank_s_own_state_whole_steps_count_as_used(epoch: EpochState) -> None:
    epoch.restore(None)  # the checkpoint is of another number of ranks
    epoch.begin(shuffled(), Progress(position=16), EpochLoss(CPU))
    assert epoch.used == 4
