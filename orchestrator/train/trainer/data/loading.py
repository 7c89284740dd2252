"""The data of a rank: which samples it sees, in which order, and its loaders, built from datasets or given by the user.

The order of an epoch depends on seed and epoch alone. All ranks follow it together: each pass takes the next batch_size
x world_size samples and distributes them. So a position, counted in samples of the whole epoch, is all that must be
saved, and any number of ranks can continue from it, with every sample seen once. Where ranks have different shares (an elastic job,
or shares by measured speed), a step takes the next ``global_batch`` samples of the epoch's order, whichever ranks compute them: the steps
are the same on any number of ranks.

A `Feed` is one loader with what is needed to start it at a position. It owns no position: the training loop counts what it
has used, since workers load ahead.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from orchestrator.train.errors import ConfigError, DataError
from orchestrator.train.script.elastic import equal_portions, share_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.train.script.elastic import BatchShare
    from orchestrator.train.script.training_context import Context
    from orchestrator.train.trainer.config.config import MultiGPUConfig
    from orchestrator.train.trainer.process_group import RankGroup

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


@runtime_checkable
class Stateful(Protocol):
    """An object that can save and restore its position."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position."""


class Feed:
    """A loader and the way to start it: by position (`sampler`), by its own state, or by skipping batches."""

    def __init__(
        self, loader: Iterable[Any], sampler: GlobalBatchSampler | None = None, *, stateful: bool = False
    ) -> None:
        self.loader = loader
        self.sampler = sampler
        self.stateful = stateful
        """The loader's own state is needed, not a position: its dataset has a state, or its length is unknown."""

    def deal(self, share: BatchShare) -> None:
        """Give this rank another share of each step, from the next start on. Raises DataError for a user's own loader."""
        if not isinstance(self.sampler, ShareSampler):
            refuse_loader(self.loader)
            return
        self.sampler.deal(share)

    @property
    def batches(self) -> int | None:
        """Return the number of batches of this rank in a whole epoch; None if unknown."""
        try:
            return len(cast("Sized", self.loader))
        except TypeError:
            return None

    def start(
        self, epoch: int, *, position: int = 0, used: int = 0, state: dict[str, Any] | None = None
    ) -> Iterator[Any]:
        """Iterate over the batches of this rank in `epoch`, from the place where training stopped.

        `position` is counted in samples of all ranks, `used` in batches of this one, `state` is the loader's own.
        """
        self._set_epoch(epoch)
        if self.stateful and state is not None:
            cast("Stateful", self.loader).load_state_dict(state)
            return iter(self.loader)
        if self.sampler is not None and (state is None or not self.stateful):
            self.sampler.seek(epoch, position)
            return iter(self.loader)
        batches = iter(self.loader)
        for _ in range(used):
            next(batches, None)
        return batches

    def state(self) -> dict[str, Any] | None:
        """Return the loader's own state, where `start` needs it."""
        return cast("Stateful", self.loader).state_dict() if self.stateful else None

    def _set_epoch(self, epoch: int) -> None:
        if self.sampler is not None:
            self.sampler.seek(epoch)
            return
        for holder in ("sampler", "batch_sampler", "dataset"):
            set_epoch = getattr(getattr(self.loader, holder, None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)


def build_feed(
    dataset: Any,
    config: MultiGPUConfig,
    place: RankGroup,
    *,
    training: bool,
    accumulate: int = 1,
    share: BatchShare | None = None,
) -> Feed:
    """Create a loader for `dataset`; a loader in its place is used unchanged, unless there is a `share` to distribute.

    Raises DataError for a dataset that is empty or has less than one optimizer step's samples.
    """
    streams = isinstance(dataset, IterableDataset | DataLoader) or not hasattr(dataset, "__getitem__")
    if share is not None and streams:
        refuse_loader(dataset)
    if isinstance(dataset, IterableDataset):
        return Feed(_stateful_loader(dataset, config, place, batch_size=config.batch_size), stateful=True)
    if streams:
        if not isinstance(dataset, Iterable):
            raise DataError(
                f"a {type(dataset).__name__} is not a dataset: it needs __getitem__ and __len__, or __iter__ (or pass a loader)"
            )
        return Feed(dataset, stateful=isinstance(dataset, Stateful))
    samples = _length(dataset)
    _check_size(samples, config, place, training=training, accumulate=accumulate, share=share)
    stateful = isinstance(dataset, Stateful)
    if stateful and training and config.balance == "measured":
        raise DataError(
            f"the dataset ({type(dataset).__name__}) has a state of its own, which does not fit when ranks get other samples: leave "
            "balance out, or state_dict and load_state_dict"
        )
    whole = type(dataset) is TensorDataset  # draws no random numbers, and can return a whole batch at once
    seeded = config.num_workers > 0 and not stateful and not whole
    shuffle = config.shuffle and training
    sampler = (
        GlobalBatchSampler(
            samples,
            batch_size=config.batch_size,
            rank=place.rank,
            world_size=place.world_size,
            shuffle=shuffle,
            seed=config.seed,
            drop_last=training,
            accumulate=accumulate if training else 1,
            draws=seeded,
        )
        if share is None
        else ShareSampler(samples, share, shuffle=shuffle, seed=config.seed, draws=seeded)
    )
    options: dict[str, Any] = {"batch_sampler": sampler}
    if whole:
        options["collate_fn"] = _as_it_is
    source = SeededSamples(dataset, config.seed) if seeded else _WholeBatches(dataset) if whole else dataset
    loader = _stateful_loader(source, config, place, **options)
    return Feed(loader, sampler, stateful=stateful)


class _WholeBatches(Dataset[list[Tensor]]):
    """A TensorDataset that returns a batch at a time: the same rows, without stacking them one by one."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        rows = torch.tensor(indices)
        return [tensor.index_select(0, rows) for tensor in self._tensors]


def _as_it_is(batch: Any) -> Any:
    return batch


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise DataError(
            f"the dataset ({type(dataset).__name__}) has no length: give it __len__, or make it an IterableDataset"
        ) from error


def _check_size(
    samples: int,
    config: MultiGPUConfig,
    place: RankGroup,
    *,
    training: bool,
    accumulate: int,
    share: BatchShare | None,
) -> None:
    needed = config.batch_size * place.world_size * accumulate if training else 1
    if share is not None:
        needed = share.global_batch
    if samples >= needed:
        return
    if samples == 0:
        raise DataError("the dataset is empty: check the path or the filter that it is made from")
    if share is not None:
        raise DataError(
            f"the dataset has {samples} samples, and one optimizer step takes {needed}: lower global_batch_size"
        )
    raise DataError(
        f"the dataset has {samples} samples, and one optimizer step takes {needed} (batch_size {config.batch_size} x "
        f"{place.world_size} ranks x {accumulate} accumulated): lower batch_size or gradient_accumulation_steps"
    )


def _stateful_loader(dataset: Any, config: MultiGPUConfig, place: RankGroup, **batching: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    workers: dict[str, Any] = {}
    if config.num_workers:
        workers = {
            "num_workers": config.num_workers,
            "prefetch_factor": config.prefetch_factor or 2,
            "persistent_workers": config.persistent_workers is not False,
        }
    pinned = config.pin_memory is not False and place.device.type == "cuda"
    # A separate generator: creating an iterator would otherwise draw from the global one, which belongs to the model.
    generator = torch.Generator().manual_seed(config.seed)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*set_vital", category=UserWarning
        )  # torchdata calls functions that torch deprecated
        return StatefulDataLoader(dataset, pin_memory=pinned, generator=generator, **batching, **workers)
