"""Integration with Hugging Face's Trainer: ``train(trainer)`` in place of ``trainer.train()``.

It reports each step and the values that the Trainer logs. When a stop is requested, the Trainer saves and the process ends. The next
start continues from the newest complete checkpoint in ``output_dir``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState

from orchestrator.train.errors import StopTraining
from orchestrator.train.integrations.common import newest, require_all_ranks
from orchestrator.train.script.training_context import current_context

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainingArguments

    from orchestrator.train.script.training_context import Context

CHECKPOINT = r"checkpoint-(\d+)"


class OrchCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Callback that reports, and saves and stops at a stop request. ``ctx`` replaces ``context()`` in tests."""

    def __init__(self, ctx: Context | None = None) -> None:
        self._ctx = current_context() if ctx is None else ctx
        self._stopping = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report the step; when a stop is requested, make the Trainer save and leave its loop."""
        del args
        total = state.max_steps if state.max_steps > 0 else None
        self._ctx.report(step=state.global_step, total_steps=total, epoch=state.epoch, phase="train")
        if self._ctx.should_stop():
            self._stopping = True
            control.should_save = control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Report the numbers that the Trainer logs."""
        del args, control
        values = {name: value for name, value in (logs or {}).items() if _is_metric(name, value)}
        self._ctx.report(step=state.global_step or None, **values)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Report the phase, so that an evaluation does not count as a hang."""
        del args, state, control
        self._ctx.report(phase="evaluate")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End the process after a stop request: its checkpoint is saved."""
        del args, control
        if self._stopping:
            raise StopTraining(state.global_step)


def train(trainer: Trainer, *, ctx: Context | None = None, **arguments: Any) -> Any:
    """Call ``trainer.train()`` under orch, with the callback, from the newest complete checkpoint in ``output_dir``.

    Training that an earlier start completed is not repeated: weights and state are loaded, and None is returned. Your own ``resume_from_checkpoint`` is used while there is no such checkpoint.
    Raises ConfigError where the Trainer has not found the job's other ranks.
    """
    ctx = current_context() if ctx is None else ctx
    remedy = "without GPUs write TrainingArguments(use_cpu=True)"
    require_all_ranks(ctx, trainer.args.world_size, library="the Trainer", remedy=remedy)
    trainer.add_callback(OrchCallback(ctx))
    found = newest(Path(trainer.args.output_dir), CHECKPOINT, _is_whole)
    if found is not None and _is_done(trainer, found):
        return None
    if found is not None:
        arguments["resume_from_checkpoint"] = str(found)
    return trainer.train(**arguments)


def _is_done(trainer: Trainer, checkpoint: Path) -> bool:
    """Return whether an earlier start completed the training; load its state then, because the Trainer would do one more step."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    wanted = trainer.args
    more = (
        wanted.max_steps > state.max_steps if wanted.max_steps > 0 else wanted.num_train_epochs > state.num_train_epochs
    )
    if more or not 0 < state.max_steps <= state.global_step:
        return False
    trainer._load_from_checkpoint(str(checkpoint))  # noqa: SLF001 - what `train` itself calls; there is no other way
    trainer.state = state
    return True


def _is_whole(checkpoint: Path) -> bool:
    """Return whether the checkpoint is complete: its state is the last file that rank 0 writes."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_bytes())
        return isinstance(state, dict) and checkpoint.name == f"checkpoint-{state['global_step']}"
    except (OSError, ValueError, KeyError):
        return False


def _is_metric(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or name in ("epoch", "step", "total_flos"):
        return False
    return name not in ("total_steps", "phase", "samples", "tokens") and not math.isinf(value)
