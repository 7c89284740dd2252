"""Shares by measured speed: their values, those of a checkpoint, and loops and settings that cannot use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from orchestrator.train.errors import ConfigError, DataError
from orchestrator.train.script.elastic import share_of, share_out
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.config.rules import Surroundings, conflicts_with_place
from orchestrator.train.trainer.data.loading import Feed, build_feed
from orchestrator.train.trainer.engine.step_clock import BusyClock, CpuClock
from orchestrator.train.trainer.engine.trainer import make_trainer
from orchestrator.train.trainer.loop.balance import MeasuredShares, new_portions
from orchestrator.train.trainer.loop.training_state import restore_shared_state, shared_state
from orchestrator.train.trainer.process_group import RankGroup
from tests.unit.train.trainer.builders import a_dataset, a_model, cross_entropy, sgd

CPU = torch.device("cpu")


def rank_of_two(rank: int = 0) -> RankGroup:
    return RankGroup(rank=rank, world_size=2, local_rank=rank, device=CPU)


def measured(**settings: Any) -> MultiGPUConfig:
    return MultiGPUConfig(batch_size=8, balance="measured", **settings)


def shares_of(portions: tuple[int, ...] = (8, 8)) -> MeasuredShares:
    return MeasuredShares(make_trainer(measured(), rank_of_two(), share_of(portions, rank=0, per_pass=8)))


def test_a_rank_at_half_speed_gets_half_the_samples() -> None:
    assert new_portions((48, 48), (1.0, 2.0)) == (64, 32)
    assert new_portions((64, 32), (1.0, 1.0)) == (64, 32)
    assert new_portions((4, 4, 4, 4), (1.0, 1.0, 1.0, 100.0)) == (5, 5, 5, 1)


def test_what_is_not_known_or_gains_little_changes_nothing() -> None:
    assert new_portions((48, 48), (1.0, 0.0)) == (48, 48)
    assert new_portions((48, 48), (1.0, 1.04)) == (48, 48)
    assert new_portions((1, 1), (1.0, 9.0)) == (1, 1)


@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(1e-6, 1e3)), min_size=1, max_size=16).map(
        lambda pairs: tuple(zip(*pairs, strict=True))
    )
)
def test_a_step_keeps_its_samples_and_does_not_get_longer(ranks: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
    portions, busy = ranks
    found = new_portions(portions, busy)
    assert sum(found) == sum(portions)
    assert min(found) >= 1
    assert max(n * b / p for n, p, b in zip(found, portions, busy, strict=True)) <= max(busy) * (1 + 1e-9)


@given(fixed=st.floats(0, 0.3), slower=st.floats(1.5, 4))
def test_shares_settle_where_all_ranks_are_done_at_the_same_time(fixed: float, slower: float) -> None:
    """This holds also where a part of a step takes the same time for any number of samples."""
    portions: tuple[int, ...] = (256, 256)

    def busy() -> tuple[float, ...]:
        return tuple(fixed + cost * n / 256 for n, cost in zip(portions, (1.0, slower), strict=True))

    for _ in range(8):
        portions = new_portions(portions, busy())
    least = (2 + fixed * (1 + 1 / slower)) / (1 + 1 / slower)  # both done at the same time, with fractions of samples
    assert max(busy()) <= least * 1.05


@given(batch=st.lists(st.integers(1, 60), min_size=1, max_size=8), per_pass=st.none() | st.integers(1, 20))
def test_unequal_shares_hold_every_sample_once_and_their_weights_make_a_mean(
    batch: list[int], per_pass: int | None
) -> None:
    everyone = [share_of(batch, rank=rank, per_pass=per_pass) for rank in range(len(batch))]
    pieces = [piece for share in everyone for piece in share.pieces]
    assert [n for piece in pieces for n in range(piece.start, piece.stop)] == list(range(sum(batch)))
    assert all(0 < piece.samples <= (per_pass or max(batch)) for piece in pieces)
    assert sum(piece.weight for piece in pieces) / len(batch) == pytest.approx(1.0)
    assert {share.same_passes for share in everyone} == {len({share.accumulation for share in everyone}) == 1}


def test_a_rank_without_a_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"portions are \[3, 0\]: each rank takes at least one sample"):
        share_of((3, 0), rank=0)


def test_busy_ends_before_other_ranks_are_waited_for() -> None:
    now = iter((1.0, 4.0))
    clock = BusyClock(CpuClock(), CPU, now=lambda: next(now))
    clock.begin()
    weight = torch.ones(1, requires_grad=True)
    loss = (weight * 2).sum()
    clock.exchange(loss)
    loss.backward()
    assert clock.busy_seconds() == [3.0]
    assert clock.busy_seconds() == []


def test_a_step_without_a_backward_pass_is_not_measured() -> None:
    clock = BusyClock(CpuClock(), CPU, now=lambda: 1.0)
    clock.begin()
    clock.begin()
    clock.done()
    clock.done()
    assert clock.busy_seconds() == [0.0]


@pytest.mark.parametrize("portions", [None, (), (4, 4, 8), (9, 8), (8, 8)])
def test_portions_that_do_not_fit_are_left(portions: tuple[int, ...] | None) -> None:
    shares = shares_of()
    shares.restore(portions)
    assert tuple(shares.portions) == (8, 8)


def test_portions_of_a_checkpoint_are_taken_over() -> None:
    trainer = make_trainer(measured(), rank_of_two(1), share_of((8, 8), rank=1, per_pass=8))
    shares = MeasuredShares(trainer)
    shares.restore((11, 5))
    assert trainer.share is not None
    assert (trainer.share.start, trainer.share.samples, trainer.accumulate) == (11, 5, 1)
    assert trainer.samples_per_step == 16


@pytest.mark.parametrize("stored", [[11, 5], [11, True], [0, 16], "11,5", None, [11, -5], [1.5, 14.5]])
def test_a_checkpoints_portions_are_checked_where_they_are_read(stored: Any) -> None:
    alone = RankGroup(rank=0, world_size=1, local_rank=0, device=CPU)
    trainer = make_trainer(MultiGPUConfig(batch_size=8), alone)
    trainer.prepare(a_model(), loss_fn=cross_entropy, optimizer=sgd)
    state = shared_state(trainer, restore_shared_state({**_state(trainer), "portions": stored}, trainer))
    assert state["portions"] is None, "shares are equal in this run"
    progress = restore_shared_state({**_state(trainer), "portions": stored}, trainer)
    assert progress.portions == ((11, 5) if stored == [11, 5] else None)


def _state(trainer: Any) -> dict[str, Any]:
    from orchestrator.train.trainer.loop.training_state import Progress

    return shared_state(trainer, Progress())


def test_loops_loaders_and_datasets_that_cannot_follow_are_refused() -> None:
    with pytest.raises(ConfigError, match="call fit or train_epoch, or leave balance out"):
        shares_of().refuse_own_loop()
    with pytest.raises(DataError, match="balance: measured, deals out the samples itself, and a DataLoader does so"):
        shares_of().deal(Feed(DataLoader(a_dataset())))
    with pytest.raises(DataError, match="has a state of its own"):
        build_feed(
            Remembering(*a_dataset().tensors),
            measured(),
            rank_of_two(),
            training=True,
            share=share_out(16, rank=0, world_size=2),
        )


class Remembering(TensorDataset):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return super().__getitem__(index)


@pytest.mark.parametrize("name", ["sync_bn", "static_graph"])
def test_settings_that_need_equal_passes_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"and {name} needs all of them in every pass: leave one out"):
        measured(**{name: True})


def _around(ranks: int) -> Surroundings:
    return Surroundings(world_size=ranks, local_rank=0, cuda_devices=0, on_cuda=False, computes_bf16=True)


def test_one_rank_has_nothing_to_share_and_any_global_batch_goes() -> None:
    assert [one.message for one in conflicts_with_place(measured(), _around(1))] == [
        "balance has nothing to share with one rank"
    ]
    assert list(conflicts_with_place(measured(global_batch_size=25), _around(2))) == []
    (finding,) = conflicts_with_place(measured(global_batch_size=3), _around(4))
    assert finding.message == "global_batch_size 3 is less than one sample for each of 4 ranks"


def test_an_own_loop_is_refused_by_the_manager(tmp_path: Path) -> None:
    """The job has one rank, but is elastic and may get more."""
    from orchestrator.train.script.environment import RankEnvironment
    from orchestrator.train.script.training_context import Context
    from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager

    ctx = Context(RankEnvironment(checkpoint_dir=str(tmp_path), device="cpu", elastic=(1, 2)))
    manager = MultiGPUTrainingManager(measured(progress_bar=False), ctx=ctx)
    _, loader, _ = manager.setup_training(a_model(), a_dataset(), loss_fn=cross_entropy, optimizer=sgd)
    with pytest.raises(ConfigError, match="a loop of your own does not see"):
        manager.train_step(next(iter(loader)))
