"""GPUs as tables and lines: their load, health, balance and findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.api.errors import DaemonUnreachableError
from orchestrator.cli.console import clean
from orchestrator.cli.render.table import Cell, Column
from orchestrator.units import percent, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from orchestrator.api.views import FindingView, JobView
    from orchestrator.cli.session import Session
    from orchestrator.gpu.row import GpuRow


LIVE_STATES = ("STARTING", "RUNNING", "RECOVERING", "DRAINING")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSummary:
    """The visible GPUs, the jobs that hold some, and errors. ``daemon`` tells whether a daemon answered."""

    rows: tuple[GpuRow, ...]
    jobs: tuple[JobView, ...] = ()
    problems: tuple[str, ...] = ()
    daemon: bool = False


def gpu_summary(session: Session, local: Callable[[], tuple[Sequence[GpuRow], Sequence[str]]]) -> GpuSummary:
    """Query the daemon; without one, use ``local``, which returns this machine's rows and problems."""
    try:
        client = session.client()
        jobs = client.jobs(states=LIVE_STATES).jobs
        rows = client.gpus()
    except DaemonUnreachableError:
        here, problems = local()
        return GpuSummary(rows=tuple(here), problems=tuple(problems))
    return GpuSummary(rows=tuple(rows), jobs=tuple(jobs), daemon=True)


BAND_STYLES = {"excellent": ("green",), "good": ("green",), "fair": ("yellow",), "poor": ("red",)}


def state_cell(row: GpuRow) -> Cell:
    """Return the GPU's state: a bad health or condition, else throttle reasons, else partitioned, ok or starting."""
    if row.health not in {"ok", "starting"}:
        return Cell(str(row.health), ("red",))
    if row.condition != "ok":
        return Cell(row.condition, ("red",))
    if row.throttle:
        return Cell(", ".join(row.throttle), ("yellow",))
    return Cell("partitioned" if not row.placeable else "ok" if row.sampled_at is not None else "starting", ("dim",))


def memory(row: GpuRow) -> str:
    """Return memory as used/total; the total alone if the use is unknown."""
    if row.memory_total_bytes is None:
        return ""
    total = size(row.memory_total_bytes)
    if row.memory_used_bytes is None:
        return total
    unit = total.split()[-1]
    used = size(row.memory_used_bytes)
    return f"{used.split()[0] if used.endswith(unit) else used}/{total}"


def power(row: GpuRow) -> str:
    """Return power/limit in watts."""
    if row.power_watts is None:
        return ""
    return (
        f"{row.power_watts:.0f}/{row.power_limit_watts:.0f} W" if row.power_limit_watts else f"{row.power_watts:.0f} W"
    )


COLUMNS: tuple[Column[GpuRow], ...] = (
    Column("NODE", lambda row: row.node, weight=900, styles=("bold",)),
    Column("GPU", lambda row: row.index, weight=1000, right=True),
    Column("MODEL", lambda row: row.model, weight=600, shrink=True),
    Column("UTIL", lambda row: percent(row.utilization_ratio), weight=950, right=True),
    Column("MEMORY", memory, weight=800, right=True),
    Column("POWER", power, weight=700, right=True),
    Column(
        "TEMP",
        lambda row: "" if row.temperature_celsius is None else f"{row.temperature_celsius:.0f} C",
        weight=500,
        right=True,
    ),
    Column("JOB", lambda row: ", ".join(dict.fromkeys(holder.job_id for holder in row.holders)), weight=850),
    Column("RANK", lambda row: ", ".join(str(holder.rank) for holder in row.holders), weight=840, right=True),
    Column("STATE", state_cell, weight=860),
    Column("UUID", lambda row: row.gpu_uuid, weight=100, styles=("dim",)),
)


def balance_line(
    balance: Mapping[str, Any] | None, quantities: Sequence[str] = ("utilization", "power")
) -> tuple[str, str]:
    """Return a text about a job's balance in these quantities, and its band; both empty for a job that has none."""
    if not balance:
        return "", ""
    known = balance.get("quantities") or {}
    spreads = {name: known[name] for name in quantities if name in known}
    worst = max(spreads, key=lambda name: float(spreads[name]["cv"]), default="")
    parts = []
    for name, spread in spreads.items():
        least = spread.get("min_per_median") if name == worst else None
        parts.append(f"{name} CV {100 * spread['cv']:.0f}%" + ("" if least is None else f" (min/median {least:.2f})"))
    band = str(balance.get("band") or "")
    if balance.get("silent"):
        parts.append(f"{len(balance['silent'])} of {balance.get('gpus')} GPUs silent")
    if not parts:
        return "", band
    return f"{band}: {', '.join(parts)}" if band else ", ".join(parts), band


def poor_balance(balance: Mapping[str, Any] | None) -> str:
    """Return one line for a job with poorly balanced or silent GPUs; empty for every other job."""
    text, band = balance_line(balance)
    if not text or not (band == "poor" or (balance or {}).get("silent")):
        return ""
    return f"balance {text}"


def finding_lines(findings: Iterable[FindingView]) -> list[str]:
    """Return a line for each finding about a job, with its advice, the gravest first."""
    return [f"{clean(one.sentence)}; {clean(one.advice)}" if one.advice else clean(one.sentence) for one in findings]
