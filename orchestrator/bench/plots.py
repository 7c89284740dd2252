"""The graphs of a benchmark: throughput by number of ranks, and the parts of a step's time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.bench.errors import BenchError
from orchestrator.parts import install_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from orchestrator.bench.results import CellResult


def write_plots(results: Sequence[CellResult], model: str, directory: Path) -> tuple[Path, ...]:
    """Draw both graphs into the directory; return their paths. Raises BenchError without matplotlib or a run."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError("graphs need matplotlib", hint=install_line("plots")) from error
    done = [one for one in results if one.runs]
    if not done:
        raise BenchError("no run ended: there is nothing to draw", hint="the log of each rank says why")
    paths = (directory / f"scaling_{model}.png", directory / f"step_parts_{model}.png")
    for path, draw in zip(paths, (_draw_scaling, _draw_parts), strict=True):
        figure = Figure(figsize=(9, 5), layout="constrained")
        draw(figure.subplots(), done)
        figure.suptitle(model)
        figure.savefig(path, format="png", dpi=110)
    return paths


def _draw_scaling(axes: Any, results: Sequence[CellResult]) -> None:
    for batch in sorted({one.cell.batch for one in results}):
        line = [one for one in results if one.cell.batch == batch]
        means = [one.throughput for one in line]
        below = [0.0 if m.low is None else max(0.0, m.mean - m.low) for m in means]
        above = [0.0 if m.high is None else max(0.0, m.high - m.mean) for m in means]
        ranks = [one.cell.ranks for one in line]
        axes.errorbar(
            ranks, [m.mean for m in means], yerr=[below, above], marker="o", capsize=3, label=f"global batch {batch}"
        )
    axes.set_xlabel("ranks")
    axes.set_xticks(sorted({one.cell.ranks for one in results}))
    axes.set_ylabel("samples/s (95 % interval)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_parts(axes: Any, results: Sequence[CellResult]) -> None:
    names = [f"{one.cell.batch}\n{one.cell.ranks} rank{'s' * (one.cell.ranks != 1)}" for one in results]
    base = [0.0] * len(results)
    for part in ("compute", "exposed", "other"):
        values = [max(0.0, getattr(one.parts, part)) * 1e3 for one in results]
        axes.bar(names, values, bottom=base, label=part if part != "exposed" else "exposed communication")
        base = [low + value for low, value in zip(base, values, strict=True)]
    hidden = [one.parts.hidden * 1e3 for one in results]
    axes.plot(names, hidden, "kx", label="hidden communication (within compute)")
    axes.set_xlabel("global batch")
    axes.set_ylabel("ms per step")
    axes.legend()
    axes.grid(alpha=0.3, axis="y")
