"""PerformanceMonitor: throughput, memory and losses of any training loop, without the trainers.

monitor = PerformanceMonitor()
monitor.start_monitoring()
for batch in loader:
    loss = step(batch)
    monitor.record_metrics(loss, batch_size=len(batch), num_gpus=2)
print(monitor.get_summary()["avg_throughput"])
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch

from orchestrator.train.trainer.engine.memory import peak_memory_bytes, reset_peak
from orchestrator.train.trainer.measure.statistics import mean_interval

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

_GIB = 1024**3


class PerformanceMonitor:
    """Records one entry per step. Not thread-safe.

    A loss that is a CUDA tensor is kept and read when the summary is made, so that recording does not wait.
    """

    def __init__(self, device: torch.device | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self._device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._clock = clock
        self._began: float | None = None
        self._last = 0.0
        self._seconds: list[float] = []
        self._samples: list[int] = []
        self._losses: list[SupportsFloat] = []
        self._gpus = 1
        self._extra: dict[str, list[float]] = {}

    def start_monitoring(self) -> None:
        """Start, or restart: drop what was recorded, and measure the peak of memory from here."""
        reset_peak(self._device)
        self._seconds, self._samples, self._losses, self._extra = [], [], [], {}
        self._began = self._last = self._clock()

    def record_metrics(self, loss: SupportsFloat, batch_size: int, num_gpus: int = 1, **more: float) -> None:
        """Record a step: its loss, the samples of all `num_gpus` GPUs together, and any other numbers.

        Raises RuntimeError before `start_monitoring`, ValueError for counts below 1.
        """
        if self._began is None:
            raise RuntimeError("call start_monitoring() before the first record_metrics()")
        if batch_size < 1 or num_gpus < 1:
            raise ValueError(f"batch_size is {batch_size} and num_gpus {num_gpus}: both count from 1")
        now = self._clock()
        self._seconds.append(now - self._last)
        self._last = now
        self._samples.append(batch_size)
        self._gpus = num_gpus
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        for name, value in more.items():
            self._extra.setdefault(name, []).append(value)

    def get_summary(self) -> dict[str, float]:
        """Return the figures so far; an empty dictionary before the first step.

        avg_throughput (samples per second, all GPUs), avg_throughput_per_gpu, avg_throughput_low and _high (95 % confidence,
        from 100 steps on), avg_step_time (seconds), max_memory_usage (GiB, the peak of this process on its GPU, or on the host),
        total_time (seconds), steps, samples, first_loss, last_loss, min_loss, and avg_ of everything else recorded.
        """
        if not self._seconds:
            return {}
        total, samples, steps = sum(self._seconds), sum(self._samples), len(self._seconds)
        losses = self._losses_as_numbers()
        finite = [loss for loss in losses if math.isfinite(loss)]
        summary = {
            "avg_throughput": samples / total if total else math.nan,
            "avg_throughput_per_gpu": samples / total / self._gpus if total else math.nan,
            "avg_step_time": total / steps,
            "max_memory_usage": peak_memory_bytes(self._device) / _GIB,
            "total_time": total,
            "steps": float(steps),
            "samples": float(samples),
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "min_loss": min(finite, default=math.nan),
        }
        interval = mean_interval(self._seconds)
        if interval is not None and interval[0] > 0:
            summary["avg_throughput_low"] = samples / steps / interval[1]
            summary["avg_throughput_high"] = samples / steps / interval[0]
        return summary | {f"avg_{name}": sum(values) / len(values) for name, values in self._extra.items()}

    def _losses_as_numbers(self) -> list[float]:
        self._losses = [float(loss) for loss in self._losses]
        return [float(loss) for loss in self._losses]

    def plot_metrics(self, path: str | os.PathLike[str]) -> None:
        """Draw loss and throughput over steps into an image file; its suffix selects the format (.png, .svg, .pdf).

        Raises RuntimeError when nothing was recorded, or when matplotlib is not installed.
        """
        if not self._seconds:
            raise RuntimeError("nothing was recorded: there is nothing to plot")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise RuntimeError("plots need matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(10, 6), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        steps = range(1, len(self._seconds) + 1)
        _draw(upper, steps, self._losses_as_numbers(), "loss")
        rates = [n / s if s else math.nan for n, s in zip(self._samples, self._seconds, strict=True)]
        _draw(lower, steps, rates, "samples/s")
        lower.set_xlabel("step")
        figure.savefig(path)


def _draw(axes: Any, steps: range, values: list[float], label: str) -> None:
    axes.plot(steps, values, linewidth=1)
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)
