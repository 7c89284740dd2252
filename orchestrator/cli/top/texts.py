"""Lines around the tables of `orch top`: head, findings, notes; and the choices made by keys."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.text import Text

from orchestrator.cli.console import clean
from orchestrator.cli.top import cells, model
from orchestrator.cli.top.model import Order
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orchestrator.cli.top.frame import Frame
    from orchestrator.gpu.balance.view import GpuRow

MOST_FINDINGS = 6


@dataclass(slots=True)
class Choices:
    """Choices made by keys: order, filter, hidden tables, whether the display is paused."""

    order: Order = Order.PLACE
    reversed: bool = False
    words: str = ""
    held: bool = False
    hidden: set[str] = field(default_factory=set)


def head(frame: Frame, choices: Choices, *, shown: int, late_seconds: float) -> Text:
    """Return two lines: the cluster, then the host and the choices. `shown` is the number of GPUs that match."""
    text = Text(f"{time.strftime('%H:%M:%S', time.localtime(frame.at))}  {model.headline(frame)}")
    if late_seconds:
        text.append(f"  nothing new for {late_seconds:.0f} s", "reverse")
    second = [frame.title] if frame.title else []
    if frame.host is not None:
        second.append(model.host_line(frame.host))
    if choices.order is not Order.PLACE or choices.reversed:
        second.append(f"by {choices.order.value}{' (turned)' if choices.reversed else ''}")
    text.append("\n" + "  ".join(second), "bright_black")
    if choices.words:
        text.append(f"  filter: {clean(choices.words)} ({shown} of {len(frame.rows)})", "yellow")
    if choices.hidden:
        text.append(f"  hidden: {', '.join(sorted(choices.hidden))} (esc shows all)", "yellow")
    if choices.held:
        text.append("  held", "reverse")
    return text


def findings(frame: Frame) -> Text:
    """Return the open findings, the severity as a word before each; empty without any."""
    found = model.findings_of(frame)
    text = Text()
    for severity, line in found[:MOST_FINDINGS]:
        text.append(f"{severity}: ", "bold red" if severity == "critical" else "bold yellow")
        text.append(clean(line) + "\n")
    if len(found) > MOST_FINDINGS:
        text.append(f"and {plural(len(found) - MOST_FINDINGS, 'more finding')}: orch status JOB\n")
    text.rstrip()
    return text


def notes(frame: Frame, rows: Iterable[GpuRow]) -> Text:
    """Return the problems of the reading and of the GPUs that are shown."""
    lines = [*frame.problems, *(f"{cells.gpu_name(row)}: {row.problem}" for row in rows if row.problem)]
    return Text("\n".join(clean(note) for note in lines))
