"""Shares of a batch: every sample once, the same steps and the same gradient on any number of ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.train.errors import ConfigError
from orchestrator.train.script.elastic import BatchShare, NotElasticError, parse_range, share_out
from orchestrator.train.script.environment import EnvironmentValueError, RankEnvironment, read_environment
from orchestrator.train.script.training_context import Context
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.data.loading import ShareSampler, step_share


def shares(batch: int, ranks: int, per_pass: int | None = None) -> list[BatchShare]:
    return [share_out(batch, rank=rank, world_size=ranks, per_pass=per_pass) for rank in range(ranks)]


def a_context(ranks: int = 2, rank: int = 0, elastic: tuple[int, int] | None = (2, 8)) -> Context:
    return Context(RankEnvironment(rank=rank, world_size=ranks, local_world_size=ranks, elastic=elastic))


def test_eight_ranks_share_as_ever_and_three_share_unevenly() -> None:
    assert [s.samples for s in shares(256, 8)] == [32] * 8
    assert [s.samples for s in shares(256, 3)] == [86, 85, 85]
    assert [s.accumulation for s in shares(256, 8, 8)] == [4] * 8
    assert {s.weight for s in shares(256, 8)} == {1.0}


@given(batch=st.integers(1, 400), ranks=st.integers(1, 20), per_pass=st.none() | st.integers(1, 50))
@settings(deadline=None)
def test_every_sample_is_someones_once_and_weights_make_a_mean(batch: int, ranks: int, per_pass: int | None) -> None:
    if batch < ranks:
        with pytest.raises(ValueError, match="cannot be shared by"):
            shares(batch, ranks, per_pass)
        return
    everyone = shares(batch, ranks, per_pass)
    pieces = [p for share in everyone for p in share.pieces]
    assert [n for p in pieces for n in range(p.start, p.stop)] == list(range(batch))
    assert all(0 < p.samples <= (per_pass or batch) for p in pieces)
    assert max(s.samples for s in everyone) - min(s.samples for s in everyone) <= 1
    assert [[p.last for p in s.pieces].count(True) for s in everyone] == [1] * ranks
    assert sum(p.weight for p in pieces) / ranks == pytest.approx(1.0)
    assert all(s.weight == pytest.approx(sum(p.weight for p in s.pieces)) for s in everyone)
    assert everyone[0].same_passes == (len({s.accumulation for s in everyone}) == 1)


@given(
    batch=st.integers(6, 30),
    samples=st.integers(0, 200),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    shuffle=st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_an_epoch_is_the_same_steps_however_often_the_ranks_change(
    batch: int, samples: int, sizes: list[int], shuffle: bool
) -> None:
    alone = ShareSampler(samples, share_out(batch, rank=0, world_size=1), shuffle=shuffle, seed=3)
    alone.seek(2)
    expected = list(alone)
    position, seen = 0, []
    for ranks in itertools.islice(itertools.cycle(sizes), len(expected)):  # another number of ranks after every step
        step: list[int] = []
        for share in shares(batch, ranks, 4):
            sampler = ShareSampler(samples, share, shuffle=shuffle, seed=3)
            sampler.seek(2, position)
            step += [n for mine in itertools.islice(sampler, share.accumulation) for n in mine]
            assert len(sampler) == len(expected) * share.accumulation
        seen.append(step)
        position += batch
    assert seen == expected
    flat = [n for step in seen for n in step]
    assert len(flat) == len(set(flat)) == samples // batch * batch


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_the_weighted_average_of_the_ranks_is_the_gradient_of_the_whole_batch(ranks: int) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(32, 4, dtype=torch.float64), torch.randn(32, dtype=torch.float64)

    def gradient(rows: slice, weight: float) -> torch.Tensor:
        model = torch.ones(4, dtype=torch.float64, requires_grad=True)
        (((inputs[rows] @ model - targets[rows]) ** 2).mean() * weight).backward()  # type: ignore[no-untyped-call]
        assert model.grad is not None
        return model.grad

    parts = [gradient(slice(p.start, p.stop), p.weight) for s in shares(32, ranks, 3) for p in s.pieces]
    average = torch.stack(parts).sum(dim=0) / ranks
    torch.testing.assert_close(average, gradient(slice(0, 32), 1.0))


def test_a_script_that_has_not_asked_is_told_at_its_first_step() -> None:
    ctx = a_context()
    ctx.report(phase="loading")
    with pytest.raises(NotElasticError, match=r"2 to 8 ranks .* call context\(\)\.batch_share"):
        ctx.report(step=1)
    with pytest.raises(NotElasticError):
        ctx.save({}, step=1)
    assert ctx.batch_share(64).samples == 32
    ctx.report(step=1)


def test_with_a_fixed_number_of_ranks_nobody_has_to_ask() -> None:
    ctx = a_context(elastic=None)
    ctx.report(step=1)
    assert ctx.elastic is None


def test_the_runtime_says_how_many_there_may_be() -> None:
    assert read_environment({"ORCH_ELASTIC": "2-8"}).elastic == (2, 8)
    with pytest.raises(EnvironmentValueError, match="ORCH_ELASTIC: '8-2' is not a range"):
        read_environment({"ORCH_ELASTIC": "8-2"})
    assert parse_range("3-3") == (3, 3)


def test_without_a_global_batch_it_is_that_of_the_most_ranks() -> None:
    share = step_share(MultiGPUConfig(batch_size=4, gradient_accumulation_steps=2), a_context())
    assert share is not None
    assert (share.global_batch, share.samples, share.accumulation) == (64, 32, 8)


def test_ranks_that_meet_in_every_pass_need_equally_many() -> None:
    config = MultiGPUConfig(batch_size=1, global_batch_size=8, training_mode="fully_sharded")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="raise batch_size or global_batch_size"):
        step_share(config, a_context(ranks=3))
