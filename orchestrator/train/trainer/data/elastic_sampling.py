"""The order of samples when the number of ranks may change, and the settings of such a run.

A step takes the next ``global_batch`` samples of the epoch's order, whichever ranks compute them. A position in the
epoch is therefore the same on any number of ranks, and so are the steps: the same samples in each, every one once per
epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.train.errors import ConfigError, DataError
from orchestrator.train.script.elastic import equal_portions, share_of
from orchestrator.train.trainer.data.sampling import GlobalBatchSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.train.script.elastic import BatchShare
    from orchestrator.train.script.training_context import Context
    from orchestrator.train.trainer.config.config import MultiGPUConfig


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
