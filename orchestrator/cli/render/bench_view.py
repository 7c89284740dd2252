"""Table of a benchmark: a row per configuration, with its speed-up if that is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.bench.report import recommendation
from orchestrator.bench.results import compare
from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.bench.results import CellResult
    from orchestrator.bench.statistics import Interval
    from orchestrator.cli.console import Console

COLUMNS = (
    Column("GLOBAL BATCH", right=True),
    Column("PER RANK", right=True, weight=50),
    Column("RANKS", right=True),
    Column("SAMPLES/S", right=True),
    Column("95 %", weight=60),
    Column("EXPOSED", right=True, weight=40),
    Column("SPEED-UP", right=True),
    Column("95 %", weight=70),
    Column("", weight=90, shrink=True),
)


def result_lines(console: Console, results: Sequence[CellResult]) -> list[str]:
    """Return the table's lines, and a line for each configuration that failed."""
    compared = {one.multi.cell: one for one in compare(results)}
    rows = []
    for one in results:
        if not one.runs:
            continue
        found = compared.get(one.cell)
        rows.append(
            (
                Cell(str(one.cell.batch)),
                Cell(str(one.cell.per_rank)),
                Cell(str(one.cell.ranks)),
                Cell(f"{one.throughput.mean:.0f}"),
                Cell(_ends(one.throughput, ",.0f"), ("dim",)),
                Cell(f"{one.parts.exposed * 1e3:.2f}ms" if one.cell.ranks > 1 else ""),
                Cell("" if found is None else f"{found.speed_up.mean:.2f}x"),
                Cell("" if found is None else _ends(found.speed_up, ".2f"), ("dim",)),
                Cell("" if found is None else recommendation(found)),
            )
        )
    failed = [
        f"{plural(one.cell.ranks, 'rank')}, global batch {one.cell.batch}: {one.error}" for one in results if one.error
    ]
    return [*render_table(console, COLUMNS, rows), *failed]


def _ends(interval: Interval, form: str) -> str:
    if interval.low is None or interval.high is None:
        return ""
    return f"{interval.low:{form}}-{interval.high:{form}}"
