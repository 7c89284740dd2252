"""Measurements of a training run: throughput, parts of the step time, memory, MFU, joules per sample.

`MetricsCollector.step_done` is on the hot path and only adds numbers. Everything expensive is in `take`, which is
called about once a second. Unknown values are left out: a GPU without a documented peak has no MFU.

MFU is the share of the device's peak that the model makes use of. Operations are counted by running the model once more on torch's meta device: no
numbers are computed, no random numbers drawn, no buffer of the real model is touched. A model whose control flow needs real numbers cannot be counted.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from orchestrator.gpu.sample import GpuReadError
from orchestrator.train.trainer.data.batches import compute_loss, count, map_tensors
from orchestrator.train.trainer.engine.memory import peak_memory_bytes
from orchestrator.train.trainer.engine.step_clock import Part
from orchestrator.train.trainer.measure.peaks import peak_flops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from orchestrator.gpu.sample import GpuReader
    from orchestrator.train.trainer.engine.trainer import MultiGPUTrainer, StepResult

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


class LateNumber:
    """Reads numbers from a device without waiting: each call returns the newest that has arrived."""

    def __init__(self) -> None:
        self._value: float | None = None
        self._host: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def read(self, number: Tensor) -> float | None:
        """Return the number itself on the CPU, else the latest earlier request that has arrived; None before the first."""
        if number.device.type != "cuda":
            return number.item()
        if self._arrived is not None and self._arrived.query():
            assert self._host is not None
            self._value, self._arrived = self._host.item(), None
        if self._arrived is None:
            self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
            self._host.copy_(number.detach().reshape(()), non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        return self._value


class EpochLoss:
    """The sum of all samples' losses, to which a loss that is not finite adds nothing."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu: Tensor | None = torch.zeros((), device=device) if device.type == "cuda" else None
        self._sum = 0.0
        self._samples = 0

    def add(self, result: StepResult) -> None:
        """Add an optimizer step."""
        if self._on_gpu is None:
            loss = result.loss.item() if result.value is None else result.value
            if math.isfinite(loss):
                self._sum += loss * result.samples
                self._samples += result.samples
        else:
            self._on_gpu.add_(result.loss.nan_to_num(0.0, 0.0, 0.0), alpha=result.samples)
            self._samples += result.samples

    def sums(self) -> tuple[float, int]:
        """Return the sum of losses over samples, and the samples, since `start`. Waits for the device."""
        return self._sum if self._on_gpu is None else float(self._on_gpu), self._samples

    def start(self, loss_sum: float = 0.0, samples: int = 0) -> None:
        """Begin an epoch, or continue with the sums of a checkpoint."""
        self._samples = samples
        if self._on_gpu is None:
            self._sum = loss_sum
        else:
            self._on_gpu.fill_(loss_sum)


BLOCKS = 20
_FEWEST_PER_BLOCK = 5
_T_975 = 2.093  # Student's t, 19 degrees of freedom, two-sided 95 %


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean of a series, by batch means; None for less than 100 values.

    Neighbouring steps resemble each other (caches, clocks, other users of the machine), so single values would give an
    interval that is too narrow. Means of twenty stretches are close to independent.
    """
    size = len(values) // BLOCKS
    if size < _FEWEST_PER_BLOCK:
        return None
    used = list(values)[-size * BLOCKS :]
    means = [sum(used[start : start + size]) / size for start in range(0, len(used), size)]
    mean = sum(means) / BLOCKS
    deviation = math.sqrt(sum((value - mean) ** 2 for value in means) / (BLOCKS - 1))
    margin = _T_975 * deviation / math.sqrt(BLOCKS)
    return mean - margin, mean + margin


READ_EVERY_SECONDS = 2.0


class EnergyMeter:
    """Follows the energy counter of one GPU. `close` ends its thread."""

    def __init__(self, reader: GpuReader, every_seconds: float = READ_EVERY_SECONDS) -> None:
        self._reader = reader
        self._every_seconds = every_seconds
        self._first: float | None = None
        self._newest: float | None = None
        self.utilization: float | None = None
        """The GPU's load when it was read last, as a ratio; None where the driver does not report it."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="energy meter", daemon=True)
        self._thread.start()

    @property
    def joules(self) -> float | None:
        """Return the energy since the meter was created, in joules, up to the newest reading; None before two readings, or without a counter."""
        if self._first is None or self._newest is None or self._newest <= self._first:
            return None
        return self._newest - self._first

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()
        self._thread.join()
        self._reader.close()

    def _follow(self) -> None:
        while True:
            try:
                sample = self._reader.read()
            except GpuReadError:
                return
            self.utilization = sample.utilization
            if sample.energy_joules is None and sample.utilization is None:
                return
            self._first = sample.energy_joules if self._first is None else self._first
            self._newest = sample.energy_joules if self._newest is None else (sample.energy_joules or self._newest)
            if self._closed.wait(self._every_seconds):
                return


def open_meter(device: torch.device) -> EnergyMeter | None:
    """Return a meter for the GPU that torch calls `device`; None for CPUs and drivers without a counter."""
    if device.type != "cuda":
        return None
    from orchestrator.gpu.drivers.nvidia import open_nvidia

    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    try:
        readers = open_nvidia()
    except GpuReadError:
        return None
    return _choose(readers, uuid)


def _choose(readers: Sequence[GpuReader], uuid: str) -> EnergyMeter | None:
    chosen = None
    for reader in readers:
        if uuid and reader.info.uuid.removeprefix("GPU-").lower() == uuid.removeprefix("GPU-").lower():
            chosen = reader
        else:
            reader.close()
    return None if chosen is None else EnergyMeter(chosen)


class MfuMeter:
    """Holds the device's peak and the operations of a sample: the configured number, else counted once with a batch."""

    def __init__(self, trainer: MultiGPUTrainer) -> None:
        config = trainer.config
        self._trainer = trainer
        self._peak = config.peak_flops or device_peak(trainer.place.device, trainer.precision.name)
        self._flops_per_sample = config.flops_per_sample
        self._counted = config.flops_per_sample is not None

    def learn(self, batch: Any) -> None:
        """Count the operations of one sample, once, if MFU can be computed at all."""
        if self._counted or self._peak is None:
            return
        self._counted = True
        trainer = self._trainer
        if trainer.shards_parameters:
            return

        def loss(model: torch.nn.Module, inputs: Any) -> Tensor:
            return compute_loss(model, inputs, trainer.loss_fn)[0]

        flops = count_flops(trainer.module, batch, loss)
        self._flops_per_sample = None if flops is None else flops / count(batch)[0]

    def of(self, samples_per_second: float) -> float | None:
        """Return the MFU at this rank's rate; None where the peak or the operations are unknown."""
        if not self._peak or not self._flops_per_sample:
            return None
        return samples_per_second * self._flops_per_sample / self._peak


class _Bound(nn.Module):
    """A model and a loss as one module, so that `functional_call` can replace the model's tensors."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


def count_flops(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]) -> float | None:
    """Return the FLOP of one forward and backward pass over `batch`; None where that requires real numbers.

    `loss` maps model and batch to a scalar. A multiplication and an addition are two operations. Operations without a
    formula in torch's counter (normalization, activations) count as zero, as is usual for MFU.
    """
    from torch.utils.flop_counter import FlopCounterMode

    bound = _Bound(model, loss)
    stand_ins = {name: _stand_in(tensor) for name, tensor in (*bound.named_parameters(), *bound.named_buffers())}
    try:
        with torch.enable_grad(), FlopCounterMode(display=False) as counter:
            output = torch.func.functional_call(bound, stand_ins, (map_tensors(batch, _stand_in),), strict=False)
            output.backward()
    except (RuntimeError, NotImplementedError, ValueError, TypeError):  # meta tensors have no values
        return None
    return float(counter.get_total_flops()) or None


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def device_peak(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of `device` in `precision`; None for CPUs and unknown GPUs."""
    if device.type != "cuda":
        return None
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    return peak_flops(torch.cuda.get_device_name(device), precision)
