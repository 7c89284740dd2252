"""Compares several runs: which was fastest, by how much, and whether the difference exceeds noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.units import number

if TYPE_CHECKING:
    from collections.abc import Mapping

_GIB = 1024**3


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
