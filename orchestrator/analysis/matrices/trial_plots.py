"""Charts of a search: each objective over the trials, and the Pareto front of several."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

from orchestrator.analysis.plots.style import COLOURS, GREY, PlotError, finish, grid_of, new_figure, save

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from orchestrator.analysis.matrices.trials import TrialResult

LABELS: Final = {"energy_joules": "energy (J)", "seconds": "time from the first report to the last (s)"}
_MOST_NUMBERS: Final = 40


def write_history(trials: Sequence[TrialResult], name: str, order: str, target: Path) -> Path:
    """Draw an objective by trial, the best so far as a line, and the pruned trials. Raises PlotError."""
    given = [trial for trial in trials if name in trial.given]
    if not given:
        raise PlotError(f"no trial has given {name}")
    figure = new_figure(9, 4.5)
    panel = figure.subplots()
    choose = max if order == "max" else min
    best: list[float] = []
    for trial in given:
        best.append(choose([*best[-1:], trial.given[name]]))
    panel.step([trial.number for trial in given], best, where="post", color=COLOURS[1], label=f"best so far ({order})")
    panel.plot(
        [trial.number for trial in given],
        [trial.given[name] for trial in given],
        linestyle="",
        marker="o",
        color=COLOURS[0],
        label="trial",
    )
    _mark_pruned(panel, trials)
    panel.legend(fontsize="small", framealpha=0.9, loc="best")
    finish(panel, x="trial", y=LABELS.get(name, name), title=f"{name} of each trial", from_zero=False)
    return save(figure, target)


def _mark_pruned(panel: Any, trials: Sequence[TrialResult]) -> None:
    pruned = [trial.number for trial in trials if trial.pruned]
    if pruned:
        low, _ = panel.get_ylim()
        panel.plot(pruned, [low] * len(pruned), linestyle="", marker="x", color=GREY, label="pruned", clip_on=False)


def write_front(trials: Sequence[TrialResult], objectives: Mapping[str, str], target: Path) -> Path:
    """Draw each pair of objectives, with a front of the trials that no other beats in all. Raises PlotError."""
    given = [trial for trial in trials if all(name in trial.given for name in objectives)]
    pairs = list(combinations(objectives, 2))
    if not given or not pairs:
        raise PlotError("no trial has given several objectives")
    rows, columns = grid_of(len(pairs))
    figure = new_figure(max(7.5, 5.5 * columns), 4.8 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, pair in zip(panels, pairs, strict=False):
        _front_panel(panel, given, pair, objectives)
    for panel in panels[len(pairs) :]:
        panel.set_visible(False)
    return save(figure, target)


def _front_panel(
    panel: Any, given: Sequence[TrialResult], pair: tuple[str, str], objectives: Mapping[str, str]
) -> None:
    across, up = pair
    front = sorted((trial for trial in given if trial.is_best), key=lambda trial: trial.given[across])
    others = [trial for trial in given if not trial.is_best]
    for chosen, style in (
        (others, {"marker": "o", "color": GREY, "label": "beaten by another trial"}),
        (front, {"marker": "D", "color": COLOURS[0], "label": "Pareto front"}),
    ):
        if chosen:
            points = [trial.given[across] for trial in chosen], [trial.given[up] for trial in chosen]
            panel.plot(*points, linestyle="", **style)
    if len(objectives) == 2:
        panel.step(
            [trial.given[across] for trial in front],
            [trial.given[up] for trial in front],
            where="post" if objectives[across] == "min" else "pre",
            color=COLOURS[0],
            linewidth=1,
        )
    for trial in front[:_MOST_NUMBERS]:
        point = (trial.given[across], trial.given[up])
        panel.annotate(str(trial.number), point, textcoords="offset points", xytext=(6, 4), fontsize="small")
    panel.margins(0.12)
    panel.legend(fontsize="small", framealpha=0.9, loc="best")
    better = " and ".join(f"{'less' if objectives[name] == 'min' else 'more'} {name}" for name in pair)
    finish(panel, x=LABELS.get(across, across), y=LABELS.get(up, up), title=f"Better: {better}", from_zero=False)
