"""Shares of a step by measured speed: a slower rank gets fewer samples, so that all ranks finish at the same time.

A rank is *busy* from the start of a step until its own gradients are complete; after that it waits for the others. Its
speed is its samples over the median of that time since the last checkpoint. Shares change at checkpoints only, on all
ranks, and that checkpoint holds the new ones: a run that continues from it makes the same steps.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from orchestrator.train.errors import ConfigError
from orchestrator.train.script.elastic import share_of
from orchestrator.train.trainer.engine.step_clock import BusyClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.train.trainer.data.loading import Feed
    from orchestrator.train.trainer.engine.trainer import MultiGPUTrainer
    from orchestrator.train.trainer.loop.epochs import Collector
    from orchestrator.train.trainer.loop.training_state import Progress

FEWEST_STEPS: Final = 5
"""Steps of each rank that a change of shares requires."""
WORTH: Final = 0.03
"""A change must make a step shorter by at least this share: less is noise."""


def new_portions(portions: Sequence[int], busy: Sequence[float]) -> tuple[int, ...]:
    """Return samples of each rank in proportion to its speed, at least one each, of the same step; unchanged where that gains little.

    ``busy`` are the seconds that each rank took for its present portion; 0 means unknown, and changes nothing.
    """
    whole, ranks = sum(portions), len(portions)
    if min(busy) <= 0:
        return tuple(portions)
    speeds = [samples / seconds for samples, seconds in zip(portions, busy, strict=True)]
    # Each rank gets one sample; the others are by speed, and the remainder goes to the ranks that lost most by rounding.
    exact = [(whole - ranks) * speed / sum(speeds) for speed in speeds]
    rounded = [int(share) for share in exact]
    by_loss = sorted(range(ranks), key=lambda rank: (rounded[rank] - exact[rank], rank))
    more = set(by_loss[: whole - ranks - sum(rounded)])
    found = tuple(1 + samples + (rank in more) for rank, samples in enumerate(rounded))
    expected = max(samples / speed for samples, speed in zip(found, speeds, strict=True))
    return found if expected <= max(busy) * (1 - WORTH) else tuple(portions)


class MeasuredShares:
    """The shares of a run with ``balance: measured``: restored from a checkpoint, changed at the next."""

    def __init__(self, trainer: MultiGPUTrainer) -> None:
        assert trainer.share is not None
        self._trainer, self._place, self._per_pass = trainer, trainer.place, trainer.config.batch_size
        if not isinstance(trainer.clock, BusyClock):
            trainer.clock = BusyClock(trainer.clock, trainer.place.device)
        self._clock = trainer.clock
        self.portions: Sequence[int] = trainer.share.portions

    def restore(self, portions: Sequence[int] | None) -> None:
        """Restore a checkpoint's portions. Those of other steps or numbers of ranks do not fit, and are ignored."""
        if portions and len(portions) == len(self.portions) and sum(portions) == sum(self.portions):
            self._take(tuple(portions))

    def measure(self) -> bool:
        """Collect all ranks' busy times, and change the portions if that pays."""
        seconds = self._clock.busy_seconds()
        own_seconds = torch.zeros(1, dtype=torch.float64, device=self._place.control_device)
        if len(seconds) >= FEWEST_STEPS:
            own_seconds[0] = median(seconds)
        everyone = [torch.zeros_like(own_seconds) for _ in self.portions]
        dist.all_gather(everyone, own_seconds) if self._place.distributed else everyone[0].copy_(own_seconds)
        return self._take(new_portions(self.portions, [float(one) for one in everyone]))

    def deal(self, feed: Feed) -> None:
        """Give a feed this rank's present share. Raises DataError for a loader that distributes samples itself."""
        assert self._trainer.share is not None
        feed.deal(self._trainer.share)

    def go_on(self, feed: Feed, collector: Collector, progress: Progress) -> None:
        """Restart the feed at the epoch's position: its workers have loaded samples of the old shares ahead."""
        self.deal(feed)
        collector.go_on(feed.start(progress.epoch, position=progress.position), self._trainer.accumulate)

    def refuse_own_loop(self) -> None:
        """Raise ConfigError: a loop over the loader keeps its iterator."""
        raise ConfigError(
            "balance: measured deals out samples anew between steps, which a loop of your own does not see: call fit or "
            "train_epoch, or leave balance out"
        )

    def _take(self, portions: Sequence[int]) -> bool:
        if portions == self.portions:
            return False
        self.portions = portions
        share = share_of(portions, rank=self._place.rank, per_pass=self._per_pass)
        self._trainer.share, self._trainer.accumulate = share, share.accumulation
        self._clock.busy_seconds()
        return True
