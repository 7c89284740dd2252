"""Every sample once, in an order that depends on the seed alone, from any place, for any number of ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.data.loading import Feed, GlobalBatchSampler, SeededSamples, build_feed
from tests.unit.train.trainer.builders import a_dataset, alone


def sampler(rank: int, world_size: int, samples: int = 40, **changes: Any) -> GlobalBatchSampler:
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "seed": 7} | changes
    return GlobalBatchSampler(samples, rank=rank, world_size=world_size, **options)


@given(samples=st.integers(1, 60), world_size=st.integers(1, 4), batch_size=st.integers(1, 5), epoch=st.integers(0, 3))
def test_ranks_share_an_epoch_without_overlap(samples: int, world_size: int, batch_size: int, epoch: int) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        one = sampler(rank, world_size, samples, batch_size=batch_size, drop_last=False)
        one.seek(epoch)
        batches = list(one)
        assert len(batches) == len(one)
        seen += [index for batch in batches for index in batch]
    assert sorted(seen) == list(range(samples))


@given(
    samples=st.integers(1, 60),
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    accumulate=st.integers(1, 3),
)
def test_training_takes_whole_steps(samples: int, world_size: int, batch_size: int, accumulate: int) -> None:
    """All ranks have equally many batches, of full size, in whole optimizer steps."""
    lengths = set()
    for rank in range(world_size):
        one = sampler(rank, world_size, samples, batch_size=batch_size, accumulate=accumulate)
        batches = list(one)
        assert all(len(batch) == batch_size for batch in batches)
        assert len(batches) == len(one)
        lengths.add(len(batches))
    assert lengths == {samples // (batch_size * world_size * accumulate) * accumulate}


@given(world_size=st.integers(1, 4), later=st.integers(1, 4), steps=st.integers(0, 5))
def test_another_number_of_ranks_goes_on_where_the_first_stopped(world_size: int, later: int, steps: int) -> None:
    """Samples that were seen and samples to come never overlap, and together are the epoch's order."""
    whole = sampler(0, 1, 48, batch_size=1)
    order = [index for (index,) in whole]
    before = [next_of(sampler(rank, world_size, 48), steps) for rank in range(world_size)]
    position = 3 * world_size * steps
    used = {index for batches in before for batch in batches for index in batch}
    assert used == set(order[:position])
    for rank in range(later):
        after = sampler(rank, later, 48)
        after.seek(0, min(position, 48))
        for batch in after:
            assert used.isdisjoint(batch)


def next_of(one: GlobalBatchSampler, steps: int) -> list[list[int]]:
    return [batch for _, batch in zip(range(steps), one, strict=False)]


def test_orders_differ_between_epochs_and_seeds_only() -> None:
    orders = []
    for seed, epoch in ((1, 0), (1, 1), (2, 0), (1, 0)):
        one = sampler(0, 1, seed=seed)
        one.seek(epoch)
        orders.append([index for batch in one for index in batch])
    assert orders[0] == orders[3]
    assert len({tuple(order) for order in orders}) == 3
    assert [i for batch in sampler(0, 1, 9, shuffle=False) for i in batch] == list(range(9))


class Draws:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(torch.rand(())), float(np.random.random())  # noqa: NPY002


def test_a_sample_draws_the_same_in_any_order() -> None:
    seeded = SeededSamples(Draws(), seed=3)
    first = [seeded[0, index] for index in range(4)]
    again = [seeded[0, index] for index in reversed(range(4))]
    assert first == again[::-1]
    assert len(set(first)) == 4
    assert seeded[1, 0] != first[0]
    assert len(seeded) == 4


def test_workers_get_what_the_configuration_says() -> None:
    feed = build_feed(a_dataset(), MultiGPUConfig(num_workers=2, batch_size=4), alone(), training=True)
    loader: Any = feed.loader
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 2, True)
    assert loader.pin_memory is False, "there is no GPU to copy to"
    on_gpu = replace(alone(), device=torch.device("cuda", 0))
    for wanted in (None, True, False):
        pinned: Any = build_feed(a_dataset(), MultiGPUConfig(pin_memory=wanted), on_gpu, training=True).loader
        assert pinned.pin_memory is (wanted is not False)
    chosen = MultiGPUConfig(num_workers=1, prefetch_factor=5, persistent_workers=False)
    loader = build_feed(a_dataset(), chosen, alone(), training=True).loader
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 5, False)


def test_evaluation_takes_every_sample_in_order() -> None:
    feed = build_feed(a_dataset(10), MultiGPUConfig(batch_size=4), alone(), training=False)
    assert [len(inputs) for inputs, _ in feed.start(0)] == [4, 4, 2]
    assert feed.batches == 3


def test_a_distributed_sampler_of_ones_own_is_told_the_epoch() -> None:
    own = DistributedSampler(a_dataset(8), num_replicas=1, rank=0)
    feed = Feed(DataLoader(a_dataset(8), sampler=own))
    feed.start(3)
    assert own.epoch == 3


def test_a_feed_without_a_length() -> None:
    assert Feed(iter([1])).batches is None  # type: ignore[arg-type]


def test_a_dataset_without_a_length_is_refused() -> None:
    class NoLength:
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ValueError, match="give it __len__"):
        build_feed(NoLength(), MultiGPUConfig(), alone(), training=True)
