"""One HTML page with everything: embedded figures, tables and charts, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING, Final

from orchestrator.analysis.reading.series import SHOWN
from orchestrator.analysis.report.text import balance_line, figures, moment, notes
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from orchestrator.analysis.measure.run_summary import RunSummary

STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #111; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top } td.n, th.n { text-align: right }
thead th { border-bottom: 1px solid #999 } figure { margin: 1.2rem 0 } img { max-width: 100%; height: auto }
figcaption, .note { color: #444 } .scroll { overflow-x: auto }
"""


def page(title: str, runs: Sequence[RunSummary], pictures: Mapping[str, Path], *, remarks: Iterable[str] = ()) -> str:
    """Return the page; ``pictures`` are PNG files by their caption. Raises OSError when one cannot be read."""
    body = [f"<h1>{escape(title)}</h1>", *(f'<p class="note">{escape(text)}</p>' for text in remarks)]
    for run in runs:
        body += _run(run)
    return document(title, [*body, *shown(pictures)])


def shown(pictures: Mapping[str, Path]) -> list[str]:
    """Return PNG files by their caption as embedded HTML. Raises OSError when one cannot be read."""
    body = ["<h2>Pictures</h2>"] if pictures else []
    for caption, path in pictures.items():
        data = base64.b64encode(path.read_bytes()).decode()
        body.append(
            f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{escape(caption)} ({escape(path.name)})</figcaption></figure>"
        )
    return body


def document(title: str, body: Iterable[str]) -> str:
    """Return a page of this HTML that loads nothing."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _run(run: RunSummary) -> list[str]:
    facts = [
        ("Start", moment(run.start)),
        ("End", moment(run.end)),
        ("Duration", f"{run.seconds:,.1f} s"),
        ("Readings", f"{run.samples:,} of {plural(len(run.gpus), 'GPU')}"),
        *(("Note", note) for note in notes(run)),
        *figures(run),
        *(("Load balance", balance_line(spread)) for spread in run.balance.spreads),
    ]
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts)
    return [f"<h2>{escape(run.name)}</h2>", f"<table>{rows}</table>", _gpus(run)]


def _gpus(run: RunSummary) -> str:
    """Return a table with a row for each GPU: mean and range of each quantity that any of them has."""
    quantities = [quantity for quantity in SHOWN if any(quantity in gpu.quantities for gpu in run.gpus)]
    if not quantities:
        return ""
    head = "".join(f'<th class="n">{SHOWN[one].name} ({SHOWN[one].unit})</th>' for one in quantities)
    rows = []
    for gpu in run.gpus:
        cells = []
        for quantity in quantities:
            found = gpu.quantities.get(quantity)
            text = "" if found is None else f"{found.mean:,.1f} ({found.minimum:,.0f} to {found.maximum:,.0f})"
            cells.append(f'<td class="n">{text}</td>')
        joules = "" if gpu.energy_joules is None else f"{gpu.energy_joules:,.0f}"
        rows.append(
            f"<tr><td>{escape(gpu.label)}</td><td>{escape(gpu.model)}</td>{''.join(cells)}<td class='n'>{joules}</td></tr>"
        )
    return (
        '<div class="scroll"><table><thead><tr><th>GPU</th><th>model</th>'
        f'{head}<th class="n">energy (J)</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        '<p class="note">Mean over time, and the lowest and the highest reading.</p>'
    )
