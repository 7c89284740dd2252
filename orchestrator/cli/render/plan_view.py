"""View of a dry run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from orchestrator.cli.console import clean
from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.cli.times import value_text
from orchestrator.units import age, number, size

if TYPE_CHECKING:
    from orchestrator.api.views import PlanReply
    from orchestrator.cli.console import Console

STARTS = {"now": ("would start now", "green"), "later": ("would wait", "yellow"), "never": ("can never start", "red")}


def plan_lines(console: Console, plan: PlanReply) -> list[str]:
    """Return where and when the job would run, and what would be copied."""
    words, colour = STARTS.get(plan.starts, (plan.starts, "dim"))
    lines = [f"{console.style(clean(plan.name), 'bold')}  {console.style(words, colour)}: {clean(plan.reason)}"]
    if plan.expected_start is not None:
        lines.append(f"  expected to start in about {age(max(0.0, plan.expected_start - time.time()))}")
    if plan.ahead:
        lines.append(f"  behind {', '.join(plan.ahead)}")
    facts = [
        ("queue", plan.queue),
        ("python", clean(plan.python)),
        ("works in", clean(plan.working_dir)),
        ("copies", f"{plan.snapshot_files} files, {size(plan.snapshot_bytes)}" if plan.snapshot_files else ""),
        ("secrets", ", ".join(plan.secrets)),
    ]
    lines += [f"  {console.style(label.ljust(10), 'dim')}{text}" for label, text in facts if text]
    columns = (Column("RANK", right=True), Column("NODE"), Column("GPUS", right=True), Column("CPUS", right=True))
    rows = [
        [Cell(str(seat.rank)), Cell(clean(seat.node)), Cell(number(seat.gpus)), Cell(number(seat.cpus))]
        for seat in plan.seats
    ]
    lines += render_table(console, columns, rows)
    lines += _combinations(console, plan)
    lines += [f"note: {clean(note)}" for note in plan.notes]
    return lines


def _combinations(console: Console, plan: PlanReply) -> list[str]:
    """Return the jobs of a matrix: a row for each, with the values as columns."""
    if not plan.combinations:
        return []
    names = list(plan.combinations[0].values)
    columns = [Column("NAME", weight=1000), *(Column(clean(name).upper(), weight=900) for name in names)]
    rows = [
        [Cell(clean(one.name)), *(Cell(clean(value_text(one.values.get(name)))) for name in names)]
        for one in plan.combinations
    ]
    count = len(plan.combinations)
    head = "1 job" if count == 1 else f"{count} jobs, the first as shown above"
    return [f"  {console.style('matrix'.ljust(10), 'dim')}{head}", *render_table(console, columns, rows)]
