"""Decides which samples a rank sees, in which order.

The order of an epoch depends on seed and epoch alone. All ranks follow it together: each pass takes the next batch_size
x world_size samples and distributes them. So a position, counted in samples of the whole epoch, is all that must be
saved, and any number of ranks can continue from it, with every sample seen once.

Where ranks have different shares (an elastic job, or shares by measured speed), a step takes the next ``global_batch``
samples of the epoch's order, whichever ranks compute them: the steps are the same on any number of ranks.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Sampler

from orchestrator.train.errors import ConfigError, DataError
from orchestrator.train.script.elastic import equal_portions, share_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.train.script.elastic import BatchShare
    from orchestrator.train.script.training_context import Context
    from orchestrator.train.trainer.config.config import MultiGPUConfig

_LARGE_PRIME = 1_000_003


class GlobalBatchSampler(Sampler[list[Any]]):
    """Distributes an epoch's samples to ranks, a batch at a time.

    `samples` is the size of the dataset, `batch_size` that of one rank's batch. The rest after the last whole pass
    is dropped in training (`drop_last`), where the next epoch's order includes it again; in evaluation the ranks
    share it, and some may get a smaller batch, or none.
    """

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool = True,
        accumulate: int = 1,
        draws: bool = False,
    ) -> None:
        self.samples, self.batch_size = samples, batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed = shuffle, seed
        self._drop_last = drop_last
        self._per_pass = batch_size * world_size
        self._unit = self._per_pass * accumulate
        self._draws = draws
        self.epoch = 0
        self.position = 0

    def seek(self, epoch: int, position: int = 0) -> None:
        """Start the next iteration in `epoch` after its first `position` samples (of all ranks together)."""
        self.epoch, self.position = epoch, position

    def __len__(self) -> int:
        """Return the number of batches of one rank in a whole epoch."""
        if self._drop_last:
            return self.samples // self._unit * (self._unit // self._per_pass)
        whole, rest = divmod(self.samples, self._per_pass)
        return whole + (1 if rest > self.rank else 0)

    def __iter__(self) -> Iterator[list[Any]]:
        epoch, position = self.epoch, self.position
        order = self._order(epoch)
        end = self.samples // self._unit * self._unit if self._drop_last else self.samples
        while position < end:
            mine = order[position : min(position + self._per_pass, end)][self.rank :: self.world_size]
            position += self._per_pass
            if not mine:
                return
            yield [(epoch, index) for index in mine] if self._draws else mine

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed(self.seed * _LARGE_PRIME + epoch)
        order: list[int] = torch.randperm(self.samples, generator=generator).tolist()
        return order


class SeededSamples(Dataset[Any]):
    """A dataset whose random choices (augmentation) depend on seed, epoch and sample alone.

    In loader workers nothing else makes them the same after a restart, because a worker's random state is lost with it.
    Takes (epoch, index), as GlobalBatchSampler yields them with `draws`.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, draw: tuple[int, int]) -> Any:
        epoch, index = draw
        seed = hash((self._seed, epoch, index)) & 0xFFFFFFFFFFFF  # a hash of whole numbers is the same in every process
        random.seed(seed)
        torch.manual_seed(seed)
        _seed_numpy(seed)
        return self._dataset[index]


def _seed_numpy(seed: int) -> None:
    import numpy as np

    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  (the generator that augmentation libraries draw from)


class ShareSampler(GlobalBatchSampler):
    """Yields the pieces of a rank's share, one after another, step by step.

    Samples after the last whole step are dropped; the next epoch's order includes them again.
    """

    def __init__(self, samples: int, share: BatchShare, *, shuffle: bool, seed: int, draws: bool = False) -> None:
        super().__init__(
            samples,
            batch_size=share.samples,
            rank=share.rank,
            world_size=share.world_size,
            shuffle=shuffle,
            seed=seed,
            draws=draws,
        )
        self._share = share

    def deal(self, share: BatchShare) -> None:
        """Give the rank another share of the same steps from the next iteration on."""
        self._share, self.batch_size = share, share.samples

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        return self.samples // self._share.global_batch * self._share.accumulation

    def __iter__(self) -> Iterator[list[Any]]:
        epoch, position = self.epoch, self.position
        order, step = self._order(epoch), self._share.global_batch
        while position + step <= self.samples:
            for piece in self._share.pieces:
                mine = order[position + piece.start : position + piece.stop]
                yield [(epoch, index) for index in mine] if self._draws else mine
            position += step


def step_share(config: MultiGPUConfig, ctx: Context) -> BatchShare | None:
    """Return this rank's share of each step where shares may differ between ranks; None where they are always equal.

    They may differ in an elastic job, and with ``balance: measured``, which begins with equal shares. Without
    ``global_batch_size`` a step has as many samples as it would have on the most ranks that the job may get. Raises
    ConfigError when ranks would have to meet in passes that only some of them have.
    """
    if ctx.elastic is None and config.balance == "equal":
        return None
    most = ctx.world_size if ctx.elastic is None else ctx.elastic[1]
    whole = config.global_batch_size or config.batch_size * config.gradient_accumulation_steps * most
    share = ctx.batch_share(whole, per_pass=config.batch_size)
    if config.balance == "measured":
        return share_of(equal_portions(whole, ctx.world_size), rank=ctx.rank, per_pass=config.batch_size)
    if not share.same_passes and (config.training_mode == "fully_sharded" or config.sync_bn):
        which = "sync_bn" if config.sync_bn else "fully_sharded"
        raise ConfigError(
            f"on {share.world_size} ranks some have fewer than {config.batch_size} samples for each pass of the others, and "
            f"{which} needs all of them in every pass: raise batch_size or global_batch_size ({whole})"
        )
    return share


def refuse_loader(dataset: Any) -> None:
    """Raise DataError: batches of a user's own loader, or a stream, cannot be redistributed."""
    raise DataError(
        f"an elastic job, and one with balance: measured, deals out the samples itself, and a {type(dataset).__name__} does so "
        "already: pass a dataset with __getitem__ and __len__, or write a fixed num_workers and no balance"
    )
