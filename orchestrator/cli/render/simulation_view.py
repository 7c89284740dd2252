"""Table of simulated policies: a column for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.units import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.analysis.simulation.comparison import Result
    from orchestrator.cli.console import Console
    from orchestrator.core.simulation.measures import Figures, Spread


def simulation_lines(console: Console, results: Sequence[Result]) -> list[str]:
    """Return the table's lines."""
    columns = [Column("", weight=200), *(Column(result.policy, right=True) for result in results)]
    cells = [_cells(result.figures) for result in results]
    rows = [[Cell(name), *(Cell(one[name]) for one in cells)] for name in cells[0]]
    return render_table(console, columns, rows)


def _cells(figures: Figures) -> dict[str, str]:
    found = {"jobs": str(figures.jobs)}
    if figures.refused:
        found["can never fit"] = str(figures.refused)
    found |= _times("completion", figures.completion) | _times("wait", figures.wait)
    return found | {
        "slowdown, mean": f"{figures.slowdown.mean:.2f}",
        "slowdown, p99": f"{figures.slowdown.p99:.2f}",
        "utilization": f"{figures.utilization:.1%}",
        "idle while jobs wait": f"{figures.idle_while_waiting:.1%}",
        "of that on partly used nodes": f"{figures.fragmentation:.1%}",
        "fairness (Jain)": f"{figures.fairness:.3f}",
        "preemptions": str(figures.preemptions),
        "GPU time lost": f"{figures.lost_gpu_seconds / 3600:.1f} h",
        "makespan": duration(figures.makespan),
    }


def _times(name: str, spread: Spread) -> dict[str, str]:
    return {
        f"{name}, mean": duration(spread.mean),
        f"{name}, median": duration(spread.median),
        f"{name}, p99": duration(spread.p99),
    }
