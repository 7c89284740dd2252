"""The current epoch on one rank: begun, continued in its middle, and saved, so that the next start uses the same batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.train.trainer.loop.training_state import random_state, restore_random_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from orchestrator.train.trainer.data.loading import Feed
    from orchestrator.train.trainer.engine.trainer import MultiGPUTrainer, StepResult
    from orchestrator.train.trainer.loop.recovery import FaultToleranceManager
    from orchestrator.train.trainer.loop.training_state import Progress
    from orchestrator.train.trainer.measure.epoch_loss import EpochLoss


class EpochState:
    """A rank's own part of a checkpoint; what all ranks share is in the progress."""

    def __init__(self, trainer: MultiGPUTrainer, faults: FaultToleranceManager) -> None:
        self._trainer = trainer
        self._faults = faults
        self._random = random_state(trainer.place.device)  # as this epoch began
        self._restored: Mapping[str, Any] | None = None  # of the checkpoint, until its epoch continues
        self.used = 0
        """Batches of this epoch that this rank has used."""

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Continue with ``saved``, this rank's part of a checkpoint, when the epoch begins; None: there is none that fits."""
        self._restored = saved

    def begin(self, feed: Feed, progress: Progress, loss: EpochLoss) -> Iterator[Any]:
        """Begin the epoch, or continue in its middle, with the next random numbers."""
        saved, self._restored = self._restored, None
        trainer = self._trainer
        device = trainer.place.device
        if saved is None:
            self._random = random_state(device)
            # Whole steps were used, also when they were those of another number of ranks.
            self.used = progress.position * trainer.accumulate // trainer.samples_per_step
            loss.start()
            return feed.start(progress.epoch, position=progress.position, used=self.used)
        self._random = saved["epoch_random"]
        self.used = int(saved["used"])
        loss.start(saved["loss_sum"], saved["loss_samples"])
        # A user's own loader draws its order from the global generators when it starts.
        restore_random_state(self._random, device)
        batches = feed.start(progress.epoch, position=progress.position, used=self.used, state=saved["loader"])
        self._faults.restore_rank(saved)
        return batches

    def advance(self, progress: Progress, result: StepResult, batches: int) -> None:
        """Count an optimizer step that used ``batches`` of this rank."""
        trainer, result = self._trainer, result.step
        self.used += batches
        progress.step += 1
        progress.position += batches * trainer.samples_per_step // trainer.accumulate
        progress.samples += round(result.samples * trainer.ranks_worth)
        progress.tokens += round(result.tokens * trainer.ranks_worth)

    def end(self, progress: Progress) -> None:
        """Go on to the next epoch."""
        progress.epoch, progress.position, self.used = progress.epoch + 1, 0, 0

    def saved(self, feed: Feed | None, loss: EpochLoss) -> dict[str, Any]:
        """Return the state for `restore`; ``feed`` is that of an epoch under way. Waits for the device."""
        loss_sum, samples = loss.sums()
        return {
            "used": self.used,
            "loader": None if feed is None else feed.state(),
            "epoch_random": self._random,
            "loss_sum": loss_sum,
            "loss_samples": samples,
        }
