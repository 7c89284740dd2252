"""Measurements of a training run: throughput, parts of the step time, memory, MFU, joules per sample.

`MetricsCollector.step_done` is on the hot path and only adds numbers. Everything expensive is in `take`, which is
called about once a second. Unknown values are left out: a GPU without a documented peak has no MFU.
"""

from __future__ import annotations

from collections import defaultdict, deque
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.train.trainer.engine.memory import peak_memory_bytes
from orchestrator.train.trainer.engine.step_clock import Part
from orchestrator.train.trainer.measure.epoch_loss import EpochLoss
from orchestrator.train.trainer.measure.late_number import LateNumber
from orchestrator.train.trainer.measure.mfu import MfuMeter
from orchestrator.train.trainer.measure.statistics import mean_interval

if TYPE_CHECKING:
    from orchestrator.train.trainer.engine.trainer import MultiGPUTrainer, StepResult
    from orchestrator.train.trainer.measure.energy import EnergyMeter

GIB = 2**30
KEPT_STEPS = 10_000
"""Durations kept for `step_seconds_list`; older ones are dropped."""


class Reading(NamedTuple):
    """Values recorded about once a second: the optimizer step, seconds of training until then, loss, the GPU's load in percent."""

    step: int
    training_time: float
    loss: float | None
    gpu_utilization: float | None


class MetricsCollector:
    """Accumulates the steps of one rank. Values are this rank's, except rates, which are of all ranks together."""

    def __init__(self, trainer: MultiGPUTrainer, *, energy: EnergyMeter | None = None) -> None:
        self._trainer = trainer
        self._energy = energy
        self.mfu = MfuMeter(trainer)
        self.epoch_loss = EpochLoss(trainer.place.device)
        self.steps = self.samples = self.tokens = 0
        self.last: StepResult | None = None
        self.step_seconds_list: deque[float] = deque(maxlen=KEPT_STEPS)
        """Seconds from the end of one step to the end of the next, without the time between epochs."""
        self.training_time = 0.0
        """Seconds of all steps together, without the time between them."""
        self._ended_at: float | None = None
        self._history: deque[Reading] = deque(maxlen=KEPT_STEPS)
        self._window = (perf_counter(), 0, 0, 0)
        self._late: dict[str, LateNumber] = defaultdict(LateNumber)

    @property
    def history(self) -> tuple[Reading, ...]:
        """Readings of loss and load over time; the oldest are dropped."""
        return tuple(self._history)

    # Hot path

    def step_done(self, result: StepResult) -> float:
        """Count an optimizer step, by the result of the call that ended it; return its end (of perf_counter)."""
        result = result.step
        self.steps += 1
        self.samples += result.samples
        self.tokens += result.tokens
        self.last = result
        self.epoch_loss.add(result)
        now = perf_counter()
        if self._ended_at is not None:
            self.step_seconds_list.append(now - self._ended_at)
            self.training_time += now - self._ended_at
        self._ended_at = now
        return now

    # Off the hot path

    def pause(self) -> None:
        """Exclude the time until the next step (validation, saving) from steps."""
        self._ended_at = None
        self._window = (perf_counter(), self.steps, self.samples, self.tokens)
        self._trainer.clock.take()

    def current(self) -> dict[str, float]:
        """Return facts of the last step: loss, learning rate, gradient norm."""
        if self.last is None:
            return {}
        values: dict[str, float | None] = {
            "loss": self._late["loss"].read(self.last.loss),
            "lr": float(self._trainer.optimizer.param_groups[0]["lr"]),
        }
        if self.last.grad_norm is not None:
            values["grad_norm"] = self._late["grad_norm"].read(self.last.grad_norm)
        return {name: value for name, value in values.items() if value is not None}

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call: rates, the parts of a step, peak memory, MFU, joules per sample."""
        now = perf_counter()
        since, steps, samples, tokens = self._window
        self._window = (now, self.steps, self.samples, self.tokens)
        seconds, steps, samples, tokens = now - since, self.steps - steps, self.samples - samples, self.tokens - tokens
        if steps == 0 or seconds <= 0:
            return {}
        rate, ranks = samples / seconds, self._trainer.ranks_worth
        self._history.append(
            Reading(self.steps, self.training_time, self.current().get("loss"), self._utilization_percent())
        )
        values = {"step_seconds": seconds / steps, "samples_per_second": rate * ranks}
        if tokens:
            values["tokens_per_second"] = tokens / seconds * ranks
        values |= self._parts()
        values["peak_memory_bytes"] = float(peak_memory_bytes(self._trainer.place.device))
        mfu = self.mfu.of(rate)
        if mfu is not None:
            values["mfu"] = mfu
        joules = None if self._energy is None else self._energy.joules
        if joules is not None and self.samples:
            values["joules_per_sample"] = joules / self.samples
        if self._trainer.guard.skipped:
            values["skipped_steps"] = float(self._trainer.guard.skipped)
        return values

    def throughput(self) -> dict[str, float]:
        """Return for the whole run so far: the mean step, samples per second, and their 95 % interval with enough steps."""
        seconds, trainer = list(self.step_seconds_list), self._trainer
        if not seconds:
            return {}
        # Shares may change, the samples of a step do not.
        samples = trainer.samples_per_step if trainer.share else self.samples * trainer.ranks_worth / self.steps
        mean = sum(seconds) / len(seconds)
        values = {"step_seconds": mean, "samples_per_second": samples / mean}
        interval = mean_interval(seconds)
        if interval is not None:
            low, high = interval
            values |= {"samples_per_second_low": samples / high, "samples_per_second_high": samples / low}
        return values

    def collected(self) -> dict[str, float | list[float] | None]:
        """Return this rank's measurements so far, under the names that multi-GPU training scripts use.

        Seconds, samples per second of all ranks, GiB at most, percent, and the losses about once a second.
        """
        return {
            "training_time": self.training_time,
            "throughput": self.throughput().get("samples_per_second"),
            "memory_usage": peak_memory_bytes(self._trainer.place.device) / GIB,
            "gpu_utilization": self._utilization_percent(),
            "loss_history": [one.loss for one in self._history if one.loss is not None],
        }

    def _utilization_percent(self) -> float | None:
        load = None if self._energy is None else self._energy.utilization
        return None if load is None else 100.0 * load

    def _parts(self) -> dict[str, float]:
        parts = self._trainer.clock.take()
        if not parts:
            return {}
        named = {f"{part.name.lower()}_seconds": seconds for part, seconds in parts.items()}
        share = self._trainer.communication_share()
        if share is not None:
            waited = parts[Part.BACKWARD] * share
            named["backward_seconds"] -= waited
            named["communication_seconds"] = waited
        return named

    def late_streak(self) -> int:
        """Return consecutive skipped updates, where only the device counts them."""
        streak = self._trainer.guard.streak_on_device
        return 0 if streak is None else int(self._late["streak"].read(streak) or 0)
