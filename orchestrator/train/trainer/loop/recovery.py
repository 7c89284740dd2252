"""Handles faults of a training run: checkpoints, resuming, stop signals, non-finite numbers, lack of memory.

Decides when to save and how to treat an error; orchestrator.checkpoint owns the files, training_state.py the state.

Ranks agree here outside of gradients. A signal reaches them at different steps, but they must leave after the same one,
or those that continue wait for ever: they communicate rarely enough to cost nothing, at the same steps, because each
exchange sets the step of the next. A rank with an error writes a note to the rendezvous store; rank 0 reads it when its
collective fails.
"""

from __future__ import annotations

import enum
import json
import math
import re
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from orchestrator.train import errors
from orchestrator.train.errors import NonFiniteLossError, TrainError, only_on_main, quiet
from orchestrator.train.trainer.engine.finite import describe_batches
from orchestrator.train.trainer.engine.memory import is_out_of_memory
from orchestrator.train.trainer.loop.balance import MeasuredShares
from orchestrator.train.trainer.loop.training_state import (
    Progress,
    random_state,
    restore_shared_state,
    shared_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from orchestrator.checkpoint.storage.directory import Checkpoint
    from orchestrator.train.script.training_context import Context
    from orchestrator.train.trainer.config.config import MultiGPUConfig
    from orchestrator.train.trainer.engine.trainer import MultiGPUTrainer
    from orchestrator.train.trainer.process_group import RankGroup

DEFAULT_FREQUENCY = 1000
_REPORT_WAIT = timedelta(seconds=5)


class Recovery(enum.StrEnum):
    """Action for a user's own loop after `handle_error`."""

    RETRY = "retry"
    """Repeat this optimizer step with the same batches: it will take less memory now."""


class FaultToleranceManager:
    """One rank's fault tolerance. With `enable_fault_tolerance: false` it saves nothing and handles no signal."""

    def __init__(self, ctx: Context, config: MultiGPUConfig, place: RankGroup) -> None:
        self._ctx = ctx
        self._config = config
        self._place = place
        self._enabled = config.enable_fault_tolerance
        self._stop = StopAgreement(place, ctx.should_stop)
        self._leaving = False
        self._trainer: MultiGPUTrainer | None = None
        self.shares: MeasuredShares | None = None
        """Division of each step among the ranks by their speed; None where it does not change."""
        self.saved_step: int | None = None
        """The step of the newest checkpoint of this process, or of the one it resumed from."""
        on_one_node = bool(ctx.job_id) and ctx.local_world_size == ctx.world_size
        self._asks_context = config.checkpoint_frequency is None and (ctx.world_size == 1 or on_one_node)
        self._frequency = config.checkpoint_frequency or DEFAULT_FREQUENCY
        # The user's explicit setting requires storage; None: as the job's interval requires.
        self._durable = True if config.checkpoint_frequency is not None else None

    def attach(self, trainer: MultiGPUTrainer) -> None:
        """Handle faults of `trainer`, which has been prepared."""
        self._trainer = trainer
        if self._config.balance == "measured":
            self.shares = MeasuredShares(trainer)

    # Checkpoints

    def resume(self) -> tuple[Progress, Mapping[str, Any] | None]:
        """Restore the newest valid checkpoint: its progress, and this rank's own state (None where it does not fit).

        Random states are restored after the loader has started (EpochState). Raises ConfigError for a checkpoint of something
        else, RecoveryTimeoutError when the other ranks do not appear.
        """
        if not self._enabled:
            return Progress(), None
        self._place.wait_for_all("resume", self._config.recovery_timeout)
        checkpoint: Checkpoint | None = self._ctx.load()
        if checkpoint is None:
            return Progress(), None
        progress = restore_shared_state(checkpoint.state, self._required())
        self.saved_step = progress.step
        if self.shares is not None:
            self.shares.restore(progress.portions)
        return progress, checkpoint.rank_state

    def due(self, step: int) -> bool:
        """Whether to save after `step`; the same on all ranks. Call after every step."""
        if not self._enabled:
            return False
        if self._asks_context:
            return self._ctx.should_save(step)
        return step % self._frequency == 0

    def save(
        self,
        progress: Progress,
        rank_state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Save a checkpoint of `progress`; every rank calls it. False when it could not be stored; training continues.

        `rank_state` is this rank's state beside its random numbers. An already saved step is saved again only before a
        stop: the first save may be in memory alone.
        """
        if not self._enabled or (self.saved_step == progress.step and not self._leaving):
            return True
        trainer = self._required()
        shared = shared_state(trainer, progress) if self._place.is_main or trainer.shards_parameters else None
        own = {**(rank_state or {}), "random": random_state(self._place.device)}
        finite = {name: value for name, value in (metrics or {}).items() if math.isfinite(value)}
        saved = self._ctx.save(shared, step=progress.step, rank_state=own, metrics=finite, durable=self._durable)
        if saved:
            self.saved_step = progress.step
        return saved

    # Signals

    def should_stop(self) -> bool:
        """Whether all ranks save and leave now. Call after every step, on every rank."""
        if not (self._enabled and self._stop.reached()):
            return False
        self._leaving = True
        self._ctx.confirm_stop()
        return True

    # Errors

    def check(self, progress: Progress, batches: Sequence[Any], streak: int) -> None:
        """Raise NonFiniteLossError when too many consecutive updates were skipped; `batches` are the last ones."""
        guard = self._required().guard
        guard.streak = max(guard.streak, streak)
        if guard.exhausted:
            raise NonFiniteLossError(self._describe(progress, batches, guard.streak))

    def _describe(self, progress: Progress, batches: Sequence[Any], streak: int) -> str:
        trainer = self._required()
        here = describe_batches(batches) or ("its own loss was not finite" if trainer.guard.bad_here else "")
        reports = self._gather(f"rank {self._place.rank}: {here}" if here else "")
        rate = trainer.optimizer.param_groups[0]["lr"]
        headline = (
            f"the loss was NaN or infinite in {streak} steps in a row, up to step {progress.step} (epoch {progress.epoch}, "
            f"lr {rate:g}, {trainer.precision.name}); these updates were skipped, the weights are those from before"
        )
        lines = [
            headline,
            *(f"- {line}" for line in reports if line),
            "lower the learning rate, set max_grad_norm, "
            + ("try precision: fp32, " if trainer.precision.name != "fp32" else "")
            + "or clean the data; "
            + ("the same command continues from the last checkpoint" if self.saved_step else "nothing was saved yet"),
        ]
        return "\n".join(lines)

    def _gather(self, line: str) -> list[str]:
        """Collect all ranks' reports; only those that arrive within a few seconds."""
        store = self._place.store
        if store is None:
            return [line]
        keys = [f"nonfinite/{rank}" for rank in range(self._place.world_size)]
        store.set(keys[self._place.rank], line)
        reports = []
        for key in keys:
            try:
                store.wait([key], _REPORT_WAIT)
                reports.append(store.get(key).decode())
            except RuntimeError:
                continue
        return reports

    def handle_error(self, error: Exception) -> Recovery:
        """Handle `error` in a user's own training loop; raise it when it cannot be handled.

            try:
                manager.train_step(batch)
            except Exception as error:
                manager.fault_tolerance.handle_error(error)  # returns if the step can be repeated

        Out of memory with `oom_retry`: batches are cut in half from now on, and RETRY is returned. Any other error ends
        training: rank 0 shows the error, the others end quietly.
        """
        trainer = self._required()
        if is_out_of_memory(error) and trainer.halve(()):
            return Recovery.RETRY
        if isinstance(error, TrainError):
            raise share_error(error, self._place, under_orch=bool(self._ctx.job_id)) from error.__cause__
        explained = explain_broken_collective(error, self._place, under_orch=bool(self._ctx.job_id))
        if explained is not None:
            raise explained from None
        if self.saved_step is not None:
            error.add_note(f"step {self.saved_step} is saved: the same command continues from there")
        raise error

    def _required(self) -> MultiGPUTrainer:
        if self._trainer is None:
            raise RuntimeError("there is no trainer yet: call setup_training, or attach(trainer)")
        return self._trainer


ASK_EVERY_SECONDS = 0.25
MAX_STEPS_BETWEEN = 256

_NOTE = "error/note"
_NOTE_WAIT = timedelta(seconds=1)
_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (?:closed|reset)|broken pipe|process ?group|socket timeout|recv(?:bytes)?\b|collective",
    re.IGNORECASE,
)


class StopAgreement:
    """Agreement of all ranks to stop after the same step. Call `reached` after every step, on every rank."""

    def __init__(self, place: RankGroup, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._distributed = place.distributed
        self._shared = torch.zeros(2, dtype=torch.float64, device=place.control_device) if place.distributed else None
        self._countdown = 1
        self._steps_between = 1
        self._asked_at = perf_counter()

    def reached(self) -> bool:
        """Whether to stop here. True on all ranks after the same step."""
        if not self._distributed:
            return self._wanted()
        wanted = self._wanted()  # always called: the first call installs the SIGTERM handler
        self._countdown -= 1
        if self._countdown > 0:
            return False
        return self._ask(wanted=wanted)

    def _ask(self, *, wanted: bool) -> bool:
        assert self._shared is not None
        now = perf_counter()
        self._shared[0] = float(wanted)
        self._shared[1] = (now - self._asked_at) / self._steps_between
        dist.all_reduce(self._shared, op=dist.ReduceOp.MAX)
        stop, slowest = self._shared.tolist()
        self._asked_at = now
        self._steps_between = min(MAX_STEPS_BETWEEN, max(1, math.floor(ASK_EVERY_SECONDS / max(slowest, 1e-6))))
        self._countdown = self._steps_between
        return bool(stop)


def share_error(error: TrainError, place: RankGroup, *, under_orch: bool) -> TrainError:
    """Inform the other ranks of the error here, and return the exception for this rank to raise.

    Rank 0's own error is raised unchanged. Another rank's error goes to rank 0, which reads it when this rank has ended
    and rank 0's collective fails: over gloo at once. Over NCCL that can take longer than a launcher waits, so there
    this rank reports the error.
    """
    if place.store is None:
        return error
    shown = place.is_main or place.device.type != "cpu"
    kind = type(error).__mro__[1] if isinstance(error, SystemExit) else type(error)
    note = {"type": kind.__name__, "text": f"rank {place.rank}: {error}", "shown": shown}
    try:
        place.store.set(_NOTE, json.dumps(note))
    except RuntimeError:  # rank 0, and with it the store, has ended
        return error
    return error if shown else only_on_main(error, rank=place.rank, under_orch=under_orch)


def explain_broken_collective(failure: Exception, place: RankGroup, *, under_orch: bool) -> TrainError | None:
    """Return the error behind a collective that failed because another rank had left; None when there is no note."""
    store = place.store
    if store is None or not _COLLECTIVE.search(f"{type(failure).__name__} {failure}"):
        return None
    try:
        store.wait([_NOTE], _NOTE_WAIT)
        note = json.loads(store.get(_NOTE))
    except (RuntimeError, ValueError):
        return None
    error: TrainError = getattr(errors, str(note["type"]), TrainError)(note["text"])
    return quiet(error) if note["shown"] else only_on_main(error, rank=place.rank, under_orch=under_orch)


@contextmanager
def one_voice(place: RankGroup, *, under_orch: bool) -> Iterator[None]:
    """End all ranks on an error on any rank, and make one of them report the reason."""
    try:
        yield
    except TrainError as error:
        raise share_error(error, place, under_orch=under_orch) from error.__cause__
    except (RuntimeError, OSError) as error:
        explained = explain_broken_collective(error, place, under_orch=under_orch)
        if explained is None:
            raise
        raise explained from None
