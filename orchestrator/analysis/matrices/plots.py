"""Charts of a matrix: each quantity by configuration, with every run in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.analysis.plots.style import GREY, PlotError, colour, finish, new_figure, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from orchestrator.analysis.matrices.summary import Configuration

UNITS: Final = {
    "seconds": "time from the first report to the last (s)",
    "step_seconds": "time of a step (s)",
    "samples_per_second": "samples per second",
    "memory_mib": "memory of all GPUs, mean (MiB)",
    "energy_joules": "energy (J)",
}
MOST_SHOWN: Final = 40
_LABEL = 60


def by_configuration(found: Sequence[Configuration], quantity: str, target: Path) -> Path:
    """Draw the mean, the range and the standard deviation of a quantity; the configurations from the top down in their order."""
    shown = [one for one in found if quantity in one.quantities][:MOST_SHOWN]
    if not shown:
        raise PlotError(f"no run has reported {quantity}")
    figure = new_figure(8.0, max(2.2, 0.6 + 0.4 * len(shown)))
    axis = figure.subplots()
    for place, one in enumerate(shown):
        values = one.quantities[quantity]
        axis.plot([values.minimum, values.maximum], [place, place], color=GREY, linewidth=1, zorder=1)
        axis.errorbar(
            values.mean, place, xerr=values.std or 0.0, fmt="o", color=colour(0), capsize=4, linewidth=2, zorder=2
        )
    labels = [f"{_short(one.label)} (n={one.quantities[quantity].runs})" for one in shown]
    axis.set_yticks(range(len(shown)), labels=labels)
    axis.set_ylim(len(shown) - 0.5, -0.5)
    finish(axis, y="", x=UNITS.get(quantity, quantity), from_zero=False)
    axis.set_title("mean and standard deviation; the thin line is the range of all runs", fontsize="small", loc="left")
    return save(figure, target)


def _short(label: str) -> str:
    return label if len(label) <= _LABEL else f"{label[: _LABEL - 3]}..."
