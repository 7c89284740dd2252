"""Data loaders for a rank: built from datasets, or given by the user, and restored in the middle of an epoch.

A `Feed` is one loader with what is needed to start it at a position. Owns no position: the training loop counts what it
has used, since workers load ahead.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from orchestrator.train.errors import DataError
from orchestrator.train.trainer.data.sampling import GlobalBatchSampler, SeededSamples, ShareSampler, refuse_loader

if TYPE_CHECKING:
    from orchestrator.train.script.elastic import BatchShare
    from orchestrator.train.trainer.config.config import MultiGPUConfig
    from orchestrator.train.trainer.process_group import RankGroup


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
