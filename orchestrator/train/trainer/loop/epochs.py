"""Iterates over data together: groups of batches for optimizer steps, evaluation, means over ranks.

Ranks with different numbers of batches would wait for each other for ever; this module detects them first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from orchestrator.train.errors import DataError, TrainError
from orchestrator.train.trainer.data.batches import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.train.trainer.data.loading import Feed
    from orchestrator.train.trainer.engine.trainer import MetricFunction, MultiGPUTrainer
    from orchestrator.train.trainer.process_group import RankGroup


def check_equal_lengths(feed: Feed, place: RankGroup, used: int) -> bool:
    """Return whether ranks must agree before each step that all have data left: when the amount of data is unknown.

    Raises DataError, on all ranks, when their numbers of batches are known and differ.
    """
    if not place.distributed or feed.sampler is not None:
        return False
    left = -1 if feed.batches is None else feed.batches - used
    shared = torch.tensor([left, -left], dtype=torch.int64, device=place.control_device)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    fewest, most = int(shared[0]), -int(shared[1])
    if fewest != most and fewest >= 0:
        raise DataError(
            f"the loader has {most} batches on one rank and {fewest} on another: give it a DistributedSampler, or pass the "
            "dataset instead of a loader"
        )
    return fewest < 0


class Collector:
    """Takes the batches of one optimizer step at a time. `agree`: all ranks end when one has no more."""

    def __init__(self, batches: Iterator[Any], size: int, place: RankGroup, *, agree: bool) -> None:
        self._batches = batches
        self._size = size
        self._place = place
        self._agree = agree
        self._taken = 0

    def take(self, epoch: int) -> list[Any]:
        """Return the next batches: as many as are accumulated, fewer at the end of the data, none after it.

        Raises DataError for any error in the dataset or the loader.
        """
        group: list[Any] = []
        try:
            while len(group) < self._size:
                group.append(next(self._batches))
        except StopIteration:
            pass
        except TrainError:
            raise
        except Exception as error:
            number = self._taken + len(group)
            raise DataError(
                f"reading batch {number} of epoch {epoch} failed: {type(error).__name__}: {error}; fix the sample, or "
                "leave it out of the dataset"
            ) from error
        if self._agree:
            del group[self._fewest(len(group)) :]
        self._taken += len(group)
        return group

    def go_on(self, batches: Iterator[Any], size: int) -> None:
        """Take other batches, this many at a time, from here on."""
        self._batches, self._size = batches, size

    def _fewest(self, here: int) -> int:
        shared = torch.tensor([here], dtype=torch.int64, device=self._place.control_device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN)
        return int(shared[0])


def evaluate(trainer: MultiGPUTrainer, feed: Feed, functions: Mapping[str, MetricFunction]) -> dict[str, float]:
    """Return the mean loss and metrics over all ranks' samples of one pass through `feed`."""
    was_training = trainer.module.training
    trainer.model.eval()
    state = torch.get_rng_state()
    try:
        sums, samples = _sum_up(trainer, feed, functions)
    finally:
        torch.set_rng_state(state)
        trainer.model.train(was_training)
    names = ["loss", *functions]
    means = mean_over_ranks([(sums.get(name, 0.0), samples) for name in names], trainer.place)
    return dict(zip(names, means, strict=True))


def _sum_up(
    trainer: MultiGPUTrainer, feed: Feed, functions: Mapping[str, MetricFunction]
) -> tuple[dict[str, float], int]:
    sums: dict[str, torch.Tensor] = {}
    samples, spare = 0, None
    together = trainer.shards_parameters and trainer.place.distributed
    collector = Collector(feed.start(0), 1, trainer.place, agree=False)
    while True:
        group = collector.take(0)
        if together and not group and _anybody(trainer.place, here=False):
            if spare is None:
                raise DataError("a rank has no data to validate on: with fully_sharded each needs at least one batch")
            trainer.eval_step(spare, {})  # only to give the others their parts of the parameters
            continue
        if not group:
            return {name: float(value) for name, value in sums.items()}, samples
        if together:
            _anybody(trainer.place, here=True)
        (spare,) = group
        size, _ = count(spare)
        for name, value in trainer.eval_step(spare, functions).items():
            sums[name] = sums.get(name, torch.zeros((), device=value.device)) + value.detach().float() * size
        samples += size


def _anybody(place: RankGroup, *, here: bool) -> bool:
    """Whether any rank still has a batch: with sharded parameters all ranks must use the model equally often."""
    shared = torch.tensor([int(here)], dtype=torch.int64, device=place.control_device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return bool(shared[0])


def mean_over_ranks(sums: Sequence[tuple[float, int]], place: RankGroup) -> list[float]:
    """Return means of (sum, samples) over all ranks' samples; NaN where there are none."""
    flat = torch.tensor(sums, dtype=torch.float64, device=place.control_device)
    if place.distributed:
        dist.all_reduce(flat)
    return [float(total / count) if count else float("nan") for total, count in flat.tolist()]
