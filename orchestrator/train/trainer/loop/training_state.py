"""The state of a training run: what must be saved so that the next step is the same as without a stop.

Shared state is the same on all ranks and fits any number of them; a rank's own state (random numbers, its loader, its part
of running sums) only fits the same number. EpochState has a rank's own part. Owns the names in a checkpoint, not its files.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from orchestrator.train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from orchestrator.train.trainer.data.loading import Feed
    from orchestrator.train.trainer.engine.trainer import MultiGPUTrainer, StepResult
    from orchestrator.train.trainer.measure.metrics import EpochLoss

FORMAT = 1


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of training. Counts are of all ranks together; `position` is the number of used samples of this epoch."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    samples: int = 0
    tokens: int = 0
    portions: tuple[int, ...] | None = None
    """Samples of each rank in a step, as in a checkpoint; None where ranks have equal shares."""
    history: list[dict[str, float]] = field(default_factory=list)
    """One entry for each finished epoch."""


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every random number generator that a training script uses."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore every generator to its state in `random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])  # noqa: NPY002  (it is the global generator that is restored)
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int, rank: int) -> None:
    """Seed each rank differently, the same in every run of the same seed."""
    mixed = seed * 1_000_003 + rank
    random.seed(mixed)
    torch.manual_seed(mixed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(mixed & 0xFFFFFFFF)


def shared_state(trainer: MultiGPUTrainer, progress: Progress) -> dict[str, Any]:
    """Return the state that all ranks share. With sharded parameters every rank must call this."""
    scaler = trainer.precision.scaler
    return {
        "format": FORMAT,
        "training_mode": str(trainer.config.training_mode),
        "model_state_dict": trainer.model_state(),
        "optimizer_state_dict": trainer.optimizer_state(),
        "scheduler_state_dict": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "scaler_state_dict": None if scaler is None else scaler.state_dict(),
        "epoch": progress.epoch,
        "step": progress.step,
        "position": progress.position,
        "samples": progress.samples,
        "tokens": progress.tokens,
        "portions": None
        if trainer.config.balance == "equal" or trainer.share is None
        else list(trainer.share.portions),
        "metrics": list(progress.history),
    }


def restore_shared_state(state: Any, trainer: MultiGPUTrainer) -> Progress:
    """Restore trainer and progress. Raises ConfigError for a checkpoint from which this run cannot continue."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ConfigError(
            "the checkpoint was not written by this training system: start with an empty checkpoint directory, or load "
            "it with orchestrator.train.context().load() in a loop of your own"
        )
    was_sharded = state["training_mode"] == "fully_sharded"
    if was_sharded != trainer.shards_parameters:
        raise ConfigError(
            f"the checkpoint was saved with training_mode {state['training_mode']}, and its optimizer state does not fit "
            f"{trainer.config.training_mode}: go on with that mode, or start with an empty checkpoint directory"
        )
    try:
        trainer.load_states(state["model_state_dict"], state["optimizer_state_dict"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the checkpoint does not fit this model and optimizer: go back to those that it was saved with, or start with "
            f"an empty checkpoint directory ({str(error).strip()[:500]})"
        ) from error
    if trainer.scheduler is not None and state["scheduler_state_dict"] is not None:
        trainer.scheduler.load_state_dict(state["scheduler_state_dict"])
    if trainer.precision.scaler is not None and state["scaler_state_dict"]:
        trainer.precision.scaler.load_state_dict(state["scaler_state_dict"])
    return Progress(
        step=state["step"],
        epoch=state["epoch"],
        position=state["position"],
        samples=state["samples"],
        tokens=state["tokens"],
        portions=_portions(state.get("portions")),
        history=list(state["metrics"]),
    )


def _portions(found: Any) -> tuple[int, ...] | None:
    """Return portions as a checkpoint holds them; missing or invalid ones mean equal shares."""
    if not isinstance(found, list) or not all(type(one) is int and one > 0 for one in found):
        return None
    return tuple(found)


class EpochState:
    """A rank's own part of a checkpoint; what all ranks share is in the progress."""

    def __init__(self, trainer: MultiGPUTrainer) -> None:
        self._trainer = trainer
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
        restore_random_state(saved["random"], device)
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
