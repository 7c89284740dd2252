"""What `orch top` shows, without a screen: order and filter, cells of the three tables, and their fit to a width."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.cli.console import UNICODE, clean
from orchestrator.cli.render import table
from orchestrator.cli.render.gpus import BAND_STYLES, balance_line, finding_lines, state_cell
from orchestrator.cli.render.jobs import gpus_text
from orchestrator.cli.top.frames import Traffic
from orchestrator.core.thresholds import UNUSED_UTILIZATION
from orchestrator.units import elapsed, number, percent, plural, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.api.views import JobView
    from orchestrator.cli.top.frames import Frame, Host, ProcessLine
    from orchestrator.gpu.row import GpuRow

    Row = tuple[str, Mapping[str, tuple[str, str]], Mapping[str, tuple[Callable[[int], str], str]]]
    """Key, cells by column, and functions that draw the cells that depend on their width."""


GAP = 1
"""Blank characters after each column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopColumn:
    """A column: its key and heading, and its part in the distribution of the width.

    `rank` 0 is always shown, in the width of its widest cell; higher ranks follow if there is room. `grows` takes the
    remaining width, up to `most`; `least` is the least width of such a column. A text that is longer than its column
    loses its middle, or, with `cut_end`, its end.
    """

    key: str
    heading: str
    rank: int = 0
    right: bool = False
    grows: bool = False
    least: int = 0
    most: int = 0
    cut_end: bool = False


def widths(columns: Sequence[TopColumn], needs: Mapping[str, int], width: int) -> dict[str, int]:
    """Return the chosen columns with their widths, in the order of `columns`.

    `needs` is the width of each column's widest cell; a column without an entry is empty and is left out, unless
    its rank is 0.
    """
    chosen: dict[str, int] = {}
    left = width
    for column in sorted(columns, key=lambda one: one.rank):
        if column.rank and column.key not in needs:
            continue
        wanted = max(column.least if column.grows else needs.get(column.key, 0), len(column.heading))
        if column.rank and wanted + GAP > left:
            continue
        chosen[column.key] = wanted
        left -= wanted + GAP
    for column in sorted((one for one in columns if one.grows and one.key in chosen), key=lambda one: one.rank):
        more = max(0, min(left, column.most - chosen[column.key]))
        chosen[column.key] += more
        left -= more
    if left < 0:
        _narrow(columns, chosen, -left)
    return {column.key: chosen[column.key] for column in columns if column.key in chosen}


def _narrow(columns: Sequence[TopColumn], chosen: dict[str, int], over: int) -> None:
    """Take the excess width from the columns that grow; no other column may be cut."""
    for column in reversed(columns):
        if column.grows and column.key in chosen:
            less = min(over, max(0, chosen[column.key] - len(column.heading)))
            chosen[column.key] -= less
            over -= less


def fitted(text: str, width: int, *, right: bool = False, cut_end: bool = False) -> str:
    """Return the text in exactly this width, with the gap after it; the middle or end of a longer text is left out."""
    if len(text) > width:
        kept = max(0, width - 1)
        tail = 0 if cut_end else kept // 2
        text = (text[: kept - tail] + "…" + (text[-tail:] if tail else ""))[:width]
    return (text.rjust(width) if right else text.ljust(width)) + " " * GAP


STEPS = " ▁▂▃▄▅▆▇█"
BLANK_BAR = UNICODE._replace(empty=" ")
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


def memory_share(row: GpuRow) -> float | None:
    """Return memory in use over total memory; None if unknown."""
    if row.memory_used_bytes is None or not row.memory_total_bytes:
        return None
    return row.memory_used_bytes / row.memory_total_bytes


_KEYS: dict[Order, Callable[[GpuRow], tuple[object, ...]]] = {
    Order.PLACE: lambda row: (row.node, row.index),
    Order.UTILIZATION: _falling(lambda row: row.utilization_ratio),
    Order.MEMORY: _falling(memory_share),
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
    """Return a share as a bar, in eighths of a character; blank where it is unknown."""
    return " " * width if share is None else table.bar(share, width, BLANK_BAR)


def load_colour(share: float | None) -> str:
    """Return green from 70% utilization on, yellow from 5% on, grey for an idle GPU."""
    if share is None or share < UNUSED_UTILIZATION:
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
        (finding.severity, f"{job.id}: {text}")
        for job in frame.jobs
        for finding, text in zip(job.findings, finding_lines(job.findings), strict=True)
    ]


Styled = tuple[str, str]
"""Text and style."""

UNKNOWN = Traffic()
BAR, LOAD, WATTS = "bar", "load", "watts"
GPU_COLUMNS = (
    TopColumn(key="node", heading="NODE", rank=1),
    TopColumn(key="gpu", heading="GPU", right=True),
    TopColumn(key="util", heading="UTIL", right=True),
    TopColumn(key=BAR, heading="", rank=8, grows=True, least=6, most=10),
    TopColumn(key="memory", heading="MEMORY", rank=2, right=True),
    TopColumn(key="power", heading="POWER", rank=3, right=True),
    TopColumn(key="temp", heading="TEMP", rank=4, right=True),
    TopColumn(key="clock", heading="CLOCK", rank=5, right=True),
    TopColumn(key="pcie", heading="PCIE OUT/IN", rank=6, right=True),
    TopColumn(key="nvlink", heading="NVLINK OUT/IN", rank=7, right=True),
    TopColumn(key=LOAD, heading="LOAD", rank=9, grows=True, least=10, most=30),
    TopColumn(key=WATTS, heading="WATTS", rank=10, grows=True, least=10, most=20),
    TopColumn(key="model", heading="MODEL", rank=11),
    TopColumn(key="job", heading="JOB:RANK", grows=True),
    TopColumn(key="state", heading="STATE"),
)
JOB_COLUMNS = (
    TopColumn(key="job", heading="JOB", grows=True),
    TopColumn(key="state", heading="STATE"),
    TopColumn(key="gpus", heading="GPUS", right=True),
    TopColumn(key="progress", heading="PROGRESS", rank=1),
    TopColumn(key="speed", heading="STEPS/S", rank=3, right=True),
    TopColumn(key="balance", heading="BALANCE", rank=2, grows=True, least=12, most=70),
)
PROCESS_COLUMNS = (
    TopColumn(key="pid", heading="PID", right=True),
    TopColumn(key="node", heading="NODE", rank=5),
    TopColumn(key="gpu", heading="GPU", right=True),
    TopColumn(key="util", heading="UTIL", rank=2, right=True),
    TopColumn(key="memory", heading="GPU MEM", rank=1, right=True),
    TopColumn(key="share", heading="MEM%", rank=4, right=True),
    TopColumn(key="cpu", heading="CPU", right=True),
    TopColumn(key="resident", heading="HOST MEM", right=True),
    TopColumn(key="time", heading="TIME", rank=6, right=True),
    TopColumn(key="user", heading="USER", rank=7),
    TopColumn(key="command", heading="COMMAND", grows=True, least=38, most=400, cut_end=True),
)


def rows_of(frame: Frame, gpus: Sequence[GpuRow]) -> tuple[list[Row], list[Row], list[Row]]:
    """Return the rows of the three tables; nodes are named if several, processes are those on `gpus` or on none."""
    several = len({row.node for row in frame.rows}) > 1
    uuids = {row.gpu_uuid for row in gpus}

    def placed(shown: dict[str, Styled]) -> dict[str, Styled]:
        return shown if several else {key: cell for key, cell in shown.items() if key != "node"}

    return (
        [(row.gpu_uuid, placed(gpu_cells(row, frame)), gpu_drawings(row, frame)) for row in gpus],
        [(job.id, job_cells(job), {}) for job in frame.jobs],
        [
            (f"{line.gpu_uuid}/{line.node}/{line.pid}", placed(process_cells(line)), {})
            for line in frame.processes
            if not line.gpu_uuid or line.gpu_uuid in uuids
        ],
    )


def gpu_cells(row: GpuRow, frame: Frame) -> dict[str, Styled]:
    """Return a GPU's cells that are not empty; `gpu_drawings` draws bars and histories once their width is known."""
    state = state_cell(row)
    words = state.text.split(", ")
    traffic = frame.traffic.get(row.gpu_uuid, UNKNOWN)
    cells = {
        "node": (clean(row.node), ""),
        "gpu": (str(row.index), ""),
        "util": (percent(row.utilization_ratio), load_colour(row.utilization_ratio)),
        "memory": (_memory(row), fill_colour(memory_share(row))),
        "power": (_power(row), ""),
        "temp": (_celsius(row), heat_colour(row.temperature_celsius)),
        "clock": ("" if row.sm_clock_hertz is None else f"{row.sm_clock_hertz / 1e6:.0f}M", ""),
        "pcie": (_both(traffic.pcie_sent, traffic.pcie_received), ""),
        "nvlink": (_both(traffic.nvlink_sent, traffic.nvlink_received), ""),
        "model": (clean(row.model), ""),
        "job": (_holders(row), ""),
        "state": (
            words[0] + (f" +{len(words) - 1}" if len(words) > 1 else ""),
            " ".join(style for style in state.styles if style != "dim"),
        ),
    }
    return {key: cell for key, cell in cells.items() if cell[0]}


def gpu_drawings(row: GpuRow, frame: Frame) -> dict[str, tuple[Callable[[int], str], str]]:
    """Return functions that draw a GPU's bar and histories in a width, with their styles."""
    watts = frame.power_history.get(row.gpu_uuid, ())
    limit = row.power_limit_watts or max((value for value in watts if value), default=1.0)
    load = load_colour(row.utilization_ratio)
    history = frame.history.get(row.gpu_uuid, ())
    return {
        BAR: (lambda width: bar(row.utilization_ratio, width), load),
        LOAD: (lambda width: graph(history, width), load),
        WATTS: (lambda width: graph(watts, width, limit), "cyan"),
    }


def gpu_detail(row: GpuRow, frame: Frame) -> str:
    """Return all values of one GPU, for narrow screens, on which the table does not show them."""
    traffic = frame.traffic.get(row.gpu_uuid, UNKNOWN)
    parts = [
        gpu_name(row),
        clean(row.model),
        "" if row.sm_clock_hertz is None else f"SM {row.sm_clock_hertz / 1e6:.0f} MHz",
        "" if row.memory_clock_hertz is None else f"memory clock {row.memory_clock_hertz / 1e6:.0f} MHz",
        "" if row.memory_activity_ratio is None else f"memory activity {percent(row.memory_activity_ratio)}",
        "" if row.fan_ratio is None else f"fan {percent(row.fan_ratio)}",
        _named("PCIe", traffic.pcie_sent, traffic.pcie_received),
        _named("NVLink", traffic.nvlink_sent, traffic.nvlink_received),
        ", ".join(f"{clean(one.job_id)}:{one.rank}" for one in row.holders),
        state_cell(row).text,
        clean(row.problem or ""),
    ]
    return "  ".join(part for part in parts if part)


def gpu_name(row: GpuRow) -> str:
    """Return text such as `GPU 3 of node1`; recordings have no nodes."""
    return f"GPU {row.index}" + (f" of {clean(row.node)}" if row.node else "")


def _memory(row: GpuRow) -> str:
    if row.memory_total_bytes is None:
        return ""
    total = f"{row.memory_total_bytes / 2**30:.0f}G"
    return total if row.memory_used_bytes is None else f"{row.memory_used_bytes / 2**30:.1f}/{total}"


def _power(row: GpuRow) -> str:
    if row.power_watts is None:
        return ""
    limit = "" if row.power_limit_watts is None else f"/{row.power_limit_watts:.0f}"
    return f"{row.power_watts:.0f}{limit}W"


def _celsius(row: GpuRow) -> str:
    return "" if row.temperature_celsius is None else f"{row.temperature_celsius:.0f}C"


def _holders(row: GpuRow) -> str:
    """Return the first rank on the GPU, and the number of others; the line below the table names them all."""
    if not row.holders:
        return ""
    more = f" +{len(row.holders) - 1}" if len(row.holders) > 1 else ""
    return f"{clean(row.holders[0].job_id)}:{row.holders[0].rank}{more}"


def rate(value: float) -> str:
    """Format bytes per second in powers of 1000: 1.2G, 35.0M."""
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.0f}{unit}" if unit in {"", "k"} else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f}T"


def _both(sent: float | None, received: float | None) -> str:
    if sent is None and received is None:
        return ""
    return "/".join("-" if value is None else rate(value) for value in (sent, received))


def _named(name: str, sent: float | None, received: float | None) -> str:
    both = _both(sent, received)
    return f"{name} out/in {both} B/s" if both else ""


def job_cells(job: JobView) -> dict[str, Styled]:
    """Return a job's cells that are not empty."""
    progress = job.progress
    step = speed = ""
    if progress is not None and progress.step is not None:
        step = f"step {progress.step}" + (f"/{progress.total_steps}" if progress.total_steps else "")
    if progress is not None and progress.steps_per_second:
        speed = number(progress.steps_per_second, 3)
    text, band = balance_line(job.balance)
    cells = {
        "job": (clean(job.id), ""),
        "state": (job.state, "green" if job.state == "RUNNING" else "yellow"),
        "gpus": (gpus_text(job), ""),
        "progress": (step, ""),
        "speed": (speed, ""),
        "balance": (clean(text), " ".join(BAND_STYLES.get(band, ()))),
    }
    return {key: cell for key, cell in cells.items() if cell[0]}


def process_cells(line: ProcessLine) -> dict[str, Styled]:
    """Return a process's cells that are not empty."""
    owner = f"[{clean(line.owner)}] " if line.owner else ""
    cells = {
        "pid": (str(line.pid), ""),
        "node": (clean(line.node), ""),
        "gpu": ("" if line.gpu is None else str(line.gpu), ""),
        "util": (percent(line.utilization), load_colour(line.utilization)),
        "memory": ("" if line.memory_bytes is None else size(line.memory_bytes), ""),
        "share": (percent(line.gpu_share), ""),
        "cpu": (f"{line.cpu_percent:.0f}%" if line.cpu_percent is not None else "", ""),
        "resident": ("" if line.resident_bytes is None else size(line.resident_bytes), ""),
        "time": ("" if line.seconds is None else elapsed(line.seconds), ""),
        "user": (clean(line.user), ""),
        "command": (line.branch + owner + clean(line.command), ""),
    }
    return {key: cell for key, cell in cells.items() if cell[0]}
