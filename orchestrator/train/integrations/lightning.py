"""Integration with Lightning: ``fit(trainer, model)`` in place of ``trainer.fit(model)``, or ``OrchCallback`` alone.

It reports each step and the logged metrics, and saves every 500 steps. When a stop is requested, it saves and ends the process. The
next start continues from the newest complete checkpoint.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.train.errors import StopTraining
from orchestrator.train.integrations.common import DRAFT, keep_newest, newest, publish, require_all_ranks
from orchestrator.train.script.training_context import current_context

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from orchestrator.train.script.training_context import Context
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:  # the same library under its older name
        from pytorch_lightning import Callback

CHECKPOINT = r"step-(\d+)\.ckpt"
FOLDER = "lightning-checkpoints"
KEEP = 2
SAVE_EVERY = 500
"""Optimizer steps."""
_RESERVED = frozenset(("step", "total_steps", "epoch", "phase", "samples", "tokens"))


class OrchCallback(Callback):  # type: ignore[misc]  # it may be untyped
    """Callback that reports, saves into ``folder`` and stops. ``ctx`` replaces ``context()`` in tests."""

    def __init__(
        self,
        folder: str | Path = FOLDER,
        *,
        save_every: int = SAVE_EVERY,
        keep: int = KEEP,
        ctx: Context | None = None,
    ) -> None:
        super().__init__()
        self._folder, self._save_every, self._keep = Path(folder), save_every, keep
        self._ctx = current_context() if ctx is None else ctx
        self._step = -1

    @property
    def newest_checkpoint(self) -> str | None:
        """Path of the newest checkpoint, for ``trainer.fit(ckpt_path=...)``; None where there is none."""
        found = newest(self._folder, CHECKPOINT)
        return None if found is None else str(found)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Report an optimizer step; save when a save is due or a stop is requested."""
        del pl_module
        step = trainer.global_step
        if step == self._step:  # a batch of an accumulated step
            return
        self._step = step
        self._ctx.report(
            step=step, total_steps=_total(trainer), epoch=trainer.current_epoch, phase="train", **_metrics(trainer)
        )
        stopping = self._ctx.should_stop()
        if stopping or step % self._save_every == 0:
            self._save(trainer, step)
        if stopping:
            raise StopTraining(step)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Report the phase, so that a validation does not count as a hang."""
        if not trainer.sanity_checking:
            self._ctx.report(phase="evaluate")

    def _save(self, trainer: Trainer, step: int) -> None:
        draft, target = self._folder / f"{DRAFT}{step}", self._folder / f"step-{step}.ckpt"
        trainer.save_checkpoint(draft)  # on all ranks: it waits for each of them
        if trainer.is_global_zero:
            publish(draft, target)
            keep_newest(self._folder, CHECKPOINT, self._keep)
        trainer.strategy.barrier()


def fit(
    trainer: Trainer,
    model: LightningModule,
    *arguments: Any,
    save_every: int = SAVE_EVERY,
    ctx: Context | None = None,
    **named: Any,
) -> None:
    """Call ``trainer.fit`` under orch: with the callback, from the newest checkpoint that the callback saved.

    Your own ``ckpt_path`` is used while there is no such checkpoint. Raises ConfigError where Lightning has not
    found the job's other ranks.
    """
    ctx = current_context() if ctx is None else ctx
    remedy = f"write Trainer(devices={ctx.local_world_size}, num_nodes={ctx.world_size // ctx.local_world_size})"
    require_all_ranks(ctx, trainer.world_size, library="Lightning", remedy=remedy)
    callback = OrchCallback(save_every=save_every, ctx=ctx)
    trainer.callbacks.append(callback)
    if callback.newest_checkpoint is not None:
        # It was written by this job. PyTorch's safe loading refuses the hyperparameters of many models.
        named |= {"ckpt_path": callback.newest_checkpoint, "weights_only": False}
    trainer.fit(model, *arguments, **named)


def _total(trainer: Trainer) -> int | None:
    total = trainer.estimated_stepping_batches
    return int(total) if math.isfinite(total) and total > 0 else None


def _metrics(trainer: Trainer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in trainer.callback_metrics.items():
        if name not in _RESERVED and value.numel() == 1 and value.device.type == "cpu":
            found[name] = float(value)
    return found
