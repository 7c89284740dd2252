"""One HTML page about a matrix: its configurations, the trials of a search with the best of them, and every picture."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from orchestrator.analysis.report.page import document, shown
from orchestrator.units import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from orchestrator.analysis.matrices.search_results import SearchResult
    from orchestrator.analysis.matrices.summary import Configuration
    from orchestrator.analysis.matrices.trials import TrialResult


def matrix_page(
    title: str,
    found: Sequence[Configuration],
    pictures: Mapping[str, Path],
    *,
    search: SearchResult | None = None,
    remarks: Iterable[str] = (),
) -> str:
    """Return the page, which loads nothing from elsewhere. Raises OSError when a picture cannot be read."""
    body = [f"<h1>{escape(title)}</h1>", *(f'<p class="note">{escape(text)}</p>' for text in remarks)]
    if search is not None:
        body += _trials(search)
    return document(title, [*body, *_configurations(found), *shown(pictures)])


def _trials(search: SearchResult) -> list[str]:
    """Return tables with a row for each trial, first the trials that no other one beats in all objectives."""
    names = list(dict.fromkeys(name for trial in search.trials for name in trial.values))
    head = ["trial", "job", "state", *names, *(f"{name} ({order})" for name, order in search.objectives.items())]
    best = [trial for trial in search.trials if trial.is_best]
    others = [trial for trial in search.trials if not trial.is_best]
    title = "Pareto front" if len(search.objectives) > 1 else "Best trial"
    parts = [f"<h2>{title}</h2>", _table(head, [_trial(trial, names, search) for trial in best])]
    if others:
        parts += ["<h2>Other trials</h2>", _table(head, [_trial(trial, names, search) for trial in others])]
    return parts


def _trial(trial: TrialResult, names: Sequence[str], search: SearchResult) -> list[str]:
    given = [number(trial.given[name], 6) if name in trial.given else "" for name in search.objectives]
    values = [str(trial.values.get(name, "")) for name in names]
    return [str(trial.number), trial.job_id, "PRUNED" if trial.pruned else trial.state, *values, *given]


def _configurations(found: Sequence[Configuration]) -> list[str]:
    quantities = list(dict.fromkeys(name for one in found for name in one.quantities))
    rows = []
    for one in found:
        cells = []
        for name in quantities:
            values = one.quantities.get(name)
            spread = "" if values is None or values.std is None else f" (±{number(values.std)})"
            cells.append("" if values is None else f"{number(values.mean, 6)}{spread}")
        rows.append([one.label, f"{one.ended} of {one.runs}", *cells])
    return ["<h2>Configurations</h2>", _table(["configuration", "runs that succeeded", *quantities], rows)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'
