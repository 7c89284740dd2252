"""Logic of `orch top` without its screen: sorting, filtering, bars and history graphs as text."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from orchestrator.cli.render.gpu_view import finding_lines
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.cli.top.frame import Frame, Host
    from orchestrator.gpu.balance.view import GpuRow

STEPS = " ▁▂▃▄▅▆▇█"
EIGHTHS = "▏▎▍▌▋▊▉█"
GOOD, FAIR, BAD = "green", "yellow", "red"


class Order(enum.Enum):
    """Sort orders of GPUs; loads are descending."""

    PLACE = "node"
    UTILIZATION = "utilization"
    MEMORY = "memory"
    POWER = "power"
    TEMPERATURE = "temperature"
    JOB = "job"

    def next(self) -> Order:
        """Return the next order."""
        orders = list(Order)
        return orders[(orders.index(self) + 1) % len(orders)]


def _falling(value: Callable[[GpuRow], float | None]) -> Callable[[GpuRow], tuple[object, ...]]:
    """Return a sort key: largest first, rows without a value last."""

    def key(row: GpuRow) -> tuple[object, ...]:
        found = value(row)
        return (found is None, -(found or 0.0), row.node, row.index)

    return key


def _memory_share(row: GpuRow) -> float | None:
    if row.memory_used_bytes is None or not row.memory_total_bytes:
        return None
    return row.memory_used_bytes / row.memory_total_bytes


_KEYS: dict[Order, Callable[[GpuRow], tuple[object, ...]]] = {
    Order.PLACE: lambda row: (row.node, row.index),
    Order.UTILIZATION: _falling(lambda row: row.utilization_ratio),
    Order.MEMORY: _falling(_memory_share),
    Order.POWER: _falling(lambda row: row.power_watts),
    Order.TEMPERATURE: _falling(lambda row: row.temperature_celsius),
    Order.JOB: lambda row: (row.job_id is None, row.job_id or "", row.rank or 0, row.node, row.index),
}


def ordered(rows: Sequence[GpuRow], order: Order, *, reverse: bool = False) -> list[GpuRow]:
    """Return the rows in this order."""
    return sorted(rows, key=_KEYS[order], reverse=reverse)


def matching(rows: Sequence[GpuRow], words: str) -> list[GpuRow]:
    """Return the rows in which every word is found: node, model, vendor, job, UUID, health or number."""
    wanted = words.lower().split()

    def text(row: GpuRow) -> str:
        jobs = " ".join(holder.job_id for holder in row.holders)
        return f"{row.node} gpu{row.index} {row.model} {row.vendor} {jobs} {row.gpu_uuid} {row.health}".lower()

    return [row for row in rows if all(word in text(row) for word in wanted)]


def graph(values: Sequence[float | None], width: int, top: float = 1.0) -> str:
    """Return the newest `width` values as a line of blocks; `top` is a full block, None a gap."""
    newest = list(values)[-width:]
    padding = " " * (width - len(newest))
    return padding + "".join(" " if value is None else STEPS[_step(value / top if top else 0.0)] for value in newest)


def _step(share: float) -> int:
    """Return the step of a share; 0 only for no load, so that a small load is visible."""
    clipped = min(1.0, max(0.0, share))
    return 0 if clipped == 0.0 else max(1, round(clipped * (len(STEPS) - 1)))


def bar(share: float | None, width: int) -> str:
    """Return a share as a bar, in eighths of a character."""
    if share is None:
        return " " * width
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    whole, part = divmod(eighths, 8)
    text = EIGHTHS[-1] * whole + (EIGHTHS[part - 1] if part else "")
    return text.ljust(width)


def load_colour(share: float | None) -> str:
    """Return green from 70% utilization on, yellow from 5% on, grey for an idle GPU."""
    if share is None or share < 0.05:
        return "bright_black"
    return GOOD if share >= 0.7 else FAIR


def heat_colour(celsius: float | None) -> str:
    """Return red from 85 degrees on, where data-centre GPUs begin to slow down, yellow from 70 on, else green."""
    if celsius is None or celsius < 70:
        return GOOD
    return FAIR if celsius < 85 else BAD


def fill_colour(share: float | None) -> str:
    """Return red from 95% of memory in use on, yellow from 80% on, else green."""
    if share is None or share < 0.8:
        return GOOD
    return FAIR if share < 0.95 else BAD


def memory_share(row: GpuRow) -> float | None:
    """Return memory in use over total memory; None if unknown."""
    return _memory_share(row)


def headline(frame: Frame) -> str:
    """Return a summary in one line: nodes, GPUs, mean utilization, power, silent GPUs, and the origin or the jobs."""
    rows = [row for row in frame.rows if row.placeable]
    loads = [row.utilization_ratio for row in rows if row.utilization_ratio is not None]
    parts = [plural(len({row.node for row in rows}), "node"), plural(len(rows), "GPU")]
    if loads:
        parts.append(f"{100 * sum(loads) / len(loads):.0f}% busy")
    watts = [row.power_watts for row in rows if row.power_watts is not None]
    if watts:
        parts.append(f"{sum(watts):.0f} W")
    broken = sum(row.health in {"stale", "failing", "lost"} for row in rows)
    if broken:
        parts.append(f"{broken} not answering")
    parts.append(frame.origin or plural(len(frame.jobs), "job"))
    return "  ".join(parts)


def host_line(host: Host) -> str:
    """Return a line about the machine that this program runs on."""
    used, total = host.memory_used_bytes / 2**30, host.memory_total_bytes / 2**30
    return (
        f"host: CPU {100 * host.cpu_share:.0f}% of {plural(host.cores, 'core')}  load {host.load:.1f}  "
        f"memory {used:.1f}/{total:.1f} GiB"
    )


def findings_of(frame: Frame) -> list[tuple[str, str]]:
    """Return (severity, line) of every open finding, those of one job together."""
    return [
        (finding.severity, f"{line.job.id}: {text}")
        for line in frame.jobs
        for finding, text in zip(line.job.findings, finding_lines(line.job.findings), strict=True)
    ]
