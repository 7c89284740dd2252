"""Integration with Accelerate: two lines in your own training loop.

run = resume(accelerator)                      # loads the newest complete state, if there is one
for step in range(run.step, total):
    ...
    run.step_done(total_steps=total, loss=loss.item())   # reports; saves every 500 steps; ends at a stop request
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import trees
from orchestrator.train.errors import StopTraining
from orchestrator.train.integrations.common import DRAFT, keep_newest, newest, publish, require_all_ranks
from orchestrator.train.script.training_context import current_context

if TYPE_CHECKING:
    from accelerate import Accelerator

    from orchestrator.train.script.training_context import Context

STATE = r"step-(\d+)"
FOLDER = "accelerate-states"
KEEP = 2
SAVE_EVERY = 500
"""Optimizer steps."""


class AcceleratedRun:
    """Progress of a run under Accelerate. ``step`` counts completed optimizer steps, also those of earlier starts."""

    def __init__(self, accelerator: Accelerator, folder: Path, ctx: Context, *, save_every: int, keep: int) -> None:
        self._accelerator, self._folder, self._ctx = accelerator, folder, ctx
        self._save_every, self._keep = save_every, keep
        self.step = 0

    def step_done(self, *, total_steps: int | None = None, epoch: float | None = None, **metrics: Any) -> None:
        """Report a completed optimizer step, and save every `save_every` steps; call it on every rank.

        When a stop is requested, saves and raises StopTraining, which ends the process with 143.
        """
        self.step += 1
        self._ctx.report(step=self.step, total_steps=total_steps, epoch=epoch, phase="train", **metrics)
        stopping = self._ctx.should_stop()
        if stopping or self.step % self._save_every == 0:
            self.save()
        if stopping:
            raise StopTraining(self.step)

    def save(self) -> None:
        """Save the state of all prepared or registered objects, and publish it when complete; call it on every rank."""
        accelerator = self._accelerator
        draft, target = self._folder / f"{DRAFT}{self.step}", self._folder / f"step-{self.step}"
        if accelerator.is_main_process:
            trees.remove(draft)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(draft))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            publish(draft, target)
            keep_newest(self._folder, STATE, self._keep)
        accelerator.wait_for_everyone()


def resume(
    accelerator: Accelerator,
    folder: str | Path = FOLDER,
    *,
    save_every: int = SAVE_EVERY,
    keep: int = KEEP,
    ctx: Context | None = None,
) -> AcceleratedRun:
    """Load the newest state in ``folder`` and return the run at its step; call it after ``accelerator.prepare``.

    Raises ConfigError where Accelerate has not found the job's other ranks.
    """
    ctx = current_context() if ctx is None else ctx
    remedy = "without GPUs write Accelerator(cpu=True)"
    require_all_ranks(ctx, accelerator.num_processes, library="Accelerate", remedy=remedy)
    run = AcceleratedRun(accelerator, Path(folder), ctx, save_every=save_every, keep=keep)
    found = newest(Path(folder), STATE)
    if found is not None:
        accelerator.load_state(str(found))
        run.step = int(found.name.removeprefix("step-"))
    return run
