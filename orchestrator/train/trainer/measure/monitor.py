"""PerformanceMonitor: throughput, memory and losses of any training loop, without the trainers.

monitor = PerformanceMonitor()
monitor.start_monitoring()
for batch in loader:
    loss = step(batch)
    monitor.record_metrics(loss, batch_size=len(batch), num_gpus=2)
print(monitor.get_summary()["avg_throughput"])

`comparison_report` compares the summaries of several runs: which was fastest, by how much, and whether the difference
exceeds noise.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch

from orchestrator.train.trainer.engine.memory import peak_memory_bytes, reset_peak
from orchestrator.train.trainer.measure.metrics import mean_interval
from orchestrator.units import number

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

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


def comparison_report(runs: Mapping[str, Mapping[str, float]]) -> str:
    """Return a Markdown table of the runs' summaries, and a sentence on each against the first.

    A summary is what MultiGPUTrainingManager.summary gives. Efficiency is throughput per rank against the first run's.
    A difference counts only where the 95 % confidence intervals of the means do not overlap. Raises ValueError for no
    runs, or one without a throughput.
    """
    if not runs:
        raise ValueError("there is nothing to compare: pass at least one run")
    missing = [name for name, run in runs.items() if not run.get("samples_per_second")]
    if missing:
        raise ValueError(f"{', '.join(missing)}: no throughput was measured; train for a few steps first")
    base = next(iter(runs.values()))
    header = ("run", "ranks", "samples/s", "95 % interval", "speed-up", "efficiency", "peak GiB", "MFU", "loss")
    rows = [header, tuple("---" for _ in header), *(_row(name, run, base) for name, run in runs.items())]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    first, *others = runs
    remarks = "\n".join(f"- {_remark(name, runs[name], first, base)}" for name in others)
    return f"{table}\n\n{remarks}\n" if remarks else f"{table}\n"


def _row(name: str, run: Mapping[str, float], base: Mapping[str, float]) -> tuple[str, ...]:
    speed_up = run["samples_per_second"] / base["samples_per_second"]
    more_ranks = run.get("ranks", 1.0) / base.get("ranks", 1.0)
    interval = "unknown"
    if "samples_per_second_low" in run:
        interval = f"{number(run['samples_per_second_low'])} to {number(run['samples_per_second_high'])}"
    return (
        name,
        f"{run.get('ranks', 1.0):.0f}",
        number(run["samples_per_second"]),
        interval,
        f"{speed_up:.2f}",
        f"{speed_up / more_ranks:.0%}",
        f"{run['peak_memory_bytes'] / _GIB:.2f}" if "peak_memory_bytes" in run else "unknown",
        f"{run['mfu']:.1%}" if "mfu" in run else "unknown",
        number(run["loss"]) if "loss" in run else "unknown",
    )


def _remark(name: str, run: Mapping[str, float], first: str, base: Mapping[str, float]) -> str:
    if "samples_per_second_low" not in run or "samples_per_second_low" not in base:
        return f"{name} against {first}: too few steps for an interval; train at least 100"
    if run["samples_per_second_low"] > base["samples_per_second_high"]:
        return f"{name} is faster than {first}: x {run['samples_per_second'] / base['samples_per_second']:.2f}"
    if run["samples_per_second_high"] < base["samples_per_second_low"]:
        return f"{name} is slower than {first}: x {run['samples_per_second'] / base['samples_per_second']:.2f}"
    return f"{name} and {first}: no difference that these runs could show"
