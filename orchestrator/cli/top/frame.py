"""Frames of `orch top` and `orch replay`: one moment of GPUs, jobs, processes and the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.api.views import JobView
    from orchestrator.cli.top.processes import ProcessLine
    from orchestrator.gpu.balance.view import GpuRow


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """A job with its balance as computed by the daemon or by this program."""

    job: JobView
    balance: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes per second that a GPU sends and receives; None if the GPU has no counter, or was sampled only once."""

    pcie_sent: float | None = None
    pcie_received: float | None = None
    nvlink_sent: float | None = None
    nvlink_received: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine of this program: processor share of all cores, their number, load, memory."""

    cpu_share: float
    cores: int
    load: float
    memory_used_bytes: int
    memory_total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One moment: GPUs with their histories of utilization and power (oldest first), jobs, processes, notes.

    `title` is the first text of the head line; `origin` says where the GPUs come from if not from the daemon.
    """

    at: float
    rows: tuple[GpuRow, ...]
    history: Mapping[str, Sequence[float | None]]
    power_history: Mapping[str, Sequence[float | None]]
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    jobs: tuple[JobLine, ...] = ()
    processes: tuple[ProcessLine, ...] = ()
    problems: tuple[str, ...] = ()
    host: Host | None = None
    title: str = ""
    origin: str = ""


class FrameSource(Protocol):
    """Source of the screen's frames."""

    @property
    def frame(self) -> Frame | None:
        """Newest frame; None before the first."""
