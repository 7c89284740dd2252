"""Cells of the three tables of `orch top`, by column: text and style, before they are fitted to a width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.cli.console import clean
from orchestrator.cli.render.gpu_view import BAND_STYLES, balance_line, state_cell
from orchestrator.cli.render.job_table import gpus_text
from orchestrator.cli.top import model
from orchestrator.cli.top.frame import Traffic
from orchestrator.cli.top.layout import TopColumn
from orchestrator.units import number, percent, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.cli.top.frame import Frame, JobLine
    from orchestrator.cli.top.processes import ProcessLine
    from orchestrator.gpu.balance.view import GpuRow

    Row = tuple[str, Mapping[str, tuple[str, str]], Mapping[str, tuple[Callable[[int], str], str]]]
    """Key, cells by column, and functions that draw the cells that depend on their width."""

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
        [(line.job.id, job_cells(line), {}) for line in frame.jobs],
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
        "util": (percent(row.utilization_ratio), model.load_colour(row.utilization_ratio)),
        "memory": (_memory(row), model.fill_colour(model.memory_share(row))),
        "power": (_power(row), ""),
        "temp": (_celsius(row), model.heat_colour(row.temperature_celsius)),
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
    load = model.load_colour(row.utilization_ratio)
    history = frame.history.get(row.gpu_uuid, ())
    return {
        BAR: (lambda width: model.bar(row.utilization_ratio, width), load),
        LOAD: (lambda width: model.graph(history, width), load),
        WATTS: (lambda width: model.graph(watts, width, limit), "cyan"),
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


def job_cells(line: JobLine) -> dict[str, Styled]:
    """Return a job's cells that are not empty."""
    job, progress = line.job, line.job.progress
    step = speed = ""
    if progress is not None and progress.step is not None:
        step = f"step {progress.step}" + (f"/{progress.total_steps}" if progress.total_steps else "")
    if progress is not None and progress.steps_per_second:
        speed = number(progress.steps_per_second, 3)
    text, band = balance_line(line.balance)
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
        "util": (percent(line.utilization), model.load_colour(line.utilization)),
        "memory": ("" if line.memory_bytes is None else size(line.memory_bytes), ""),
        "share": (percent(line.gpu_share), ""),
        "cpu": (f"{line.cpu_percent:.0f}%" if line.cpu_percent is not None else "", ""),
        "resident": ("" if line.resident_bytes is None else size(line.resident_bytes), ""),
        "time": ("" if line.seconds is None else _age(line.seconds), ""),
        "user": (clean(line.user), ""),
        "command": (line.branch + owner + clean(line.command), ""),
    }
    return {key: cell for key, cell in cells.items() if cell[0]}


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
