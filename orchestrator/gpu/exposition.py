"""Samples as Prometheus text, by the names of the catalogue.

Each GPU renders a block: the lines of its series, one entry per metric family. `compose` puts the blocks of several GPUs
together with the families' headers, for the format wants a family's lines side by side. What a sample does not have
yields no line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator import catalogue
from orchestrator.catalogue import METRICS, Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from orchestrator.gpu.sample import GpuInfo, Sample

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

FAMILIES: Final[tuple[Metric, ...]] = tuple(metric for metric in METRICS if metric.owner == "gpu")
_HEADERS: Final = tuple(
    f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.type}\n".encode() for metric in FAMILIES
)
_POSITION: Final = {metric.name: number for number, metric in enumerate(FAMILIES)}

Block = tuple[bytes, ...]
"""A GPU's lines, an entry for each of `FAMILIES`; empty where it has none."""

Series = tuple[Metric, tuple[str, ...], float]
"""(metric, values of the labels after gpu_uuid, value)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterStatus:
    """What an exporter knows of itself for one GPU; times in seconds of Unix time, None for never."""

    up: bool
    last_success: float | None
    read_errors: int


def series(info: GpuInfo, node: str, sample: Sample, *, processes: bool = False) -> Iterator[Series]:
    """All series of a sample, with `processes` one more for each process that it names."""
    yield (
        catalogue.GPU_INFO,
        (str(info.index), node, info.vendor, info.model, info.pci_bus_id, info.driver_version),
        1,
    )
    for metric, value in (
        (catalogue.GPU_UTILIZATION, sample.utilization),
        (catalogue.GPU_MEMORY_ACTIVITY, sample.memory_activity),
        (catalogue.GPU_MEMORY_USED, sample.memory_used_bytes),
        (catalogue.GPU_MEMORY_TOTAL, sample.memory_total_bytes),
        (catalogue.GPU_POWER, sample.power_watts),
        (catalogue.GPU_POWER_LIMIT, sample.power_limit_watts),
        (catalogue.GPU_ENERGY, sample.energy_joules),
        (catalogue.GPU_FAN, sample.fan),
        (catalogue.GPU_PCIE_TRANSMIT, sample.pcie_transmit_bytes),
        (catalogue.GPU_PCIE_RECEIVE, sample.pcie_receive_bytes),
        (catalogue.EXPORTER_COLLECT_DURATION, sample.duration_seconds),
    ):
        if value is not None:
            yield metric, (), value
    yield from _sensors(sample)
    yield from _traffic(sample)
    yield from _errors(sample)
    if processes:
        yield from _processes(sample)


def _sensors(sample: Sample) -> Iterator[Series]:
    for sensor, celsius in sample.temperatures:
        yield catalogue.GPU_TEMPERATURE, (sensor,), celsius
    for sensor, limit, celsius in sample.temperature_limits:
        yield catalogue.GPU_TEMPERATURE_LIMIT, (sensor, limit), celsius
    for domain, hertz in sample.clocks:
        yield catalogue.GPU_CLOCK, (domain,), hertz
    for reason, active in sample.throttle:
        yield catalogue.GPU_THROTTLE_ACTIVE, (reason,), int(active)
    for reason, seconds in sample.throttle_seconds:
        yield catalogue.GPU_THROTTLE, (reason,), seconds


def _traffic(sample: Sample) -> Iterator[Series]:
    for link, sent, received in sample.nvlinks:
        if sent is not None:
            yield catalogue.GPU_NVLINK_TRANSMIT, (str(link),), sent
        if received is not None:
            yield catalogue.GPU_NVLINK_RECEIVE, (str(link),), received


def _processes(sample: Sample) -> Iterator[Series]:
    for process in sample.processes:
        if process.memory_bytes is not None:
            yield catalogue.GPU_PROCESS_MEMORY, (str(process.pid),), process.memory_bytes


def _errors(sample: Sample) -> Iterator[Series]:
    for severity, scope, count in sample.ecc_errors:
        yield catalogue.GPU_ECC_ERRORS, (severity, scope), count
    for cause, rows in sample.remapped_rows:
        yield catalogue.GPU_REMAPPED_ROWS, (cause,), rows
    for xid in sample.xids:
        yield catalogue.GPU_XID_ERRORS, (str(xid.code),), xid.count
        yield catalogue.GPU_XID_LAST_TIMESTAMP, (str(xid.code),), xid.last_timestamp


class Renderer:
    """Renders one GPU's samples; the part of a line that never changes is made once."""

    def __init__(self, info: GpuInfo, node: str, *, processes: bool = False) -> None:
        """Render for this GPU on this node; a series for every process only when asked for."""
        self._info = info
        self._processes = processes
        self._node = node
        self._starts: dict[tuple[str, tuple[str, ...]], str] = {}

    def block(self, sample: Sample | None, status: ExporterStatus) -> Block:
        """The GPU's lines; without a sample only the exporter's own, which say that the GPU is not up."""
        lines: list[list[str]] = [[] for _ in FAMILIES]
        if sample is not None and status.up:
            for metric, labels, value in series(self._info, self._node, sample, processes=self._processes):
                lines[_POSITION[metric.name]].append(f"{self._start(metric, labels)}{value!r}\n")
        for metric, labels, value in self._own(status):
            lines[_POSITION[metric.name]].append(f"{self._start(metric, labels)}{value!r}\n")
        return tuple("".join(family).encode() for family in lines)

    def _own(self, status: ExporterStatus) -> Iterator[Series]:
        yield catalogue.EXPORTER_UP, (str(self._info.index), self._node), int(status.up)
        if status.last_success is not None:
            yield catalogue.EXPORTER_LAST_SUCCESS_TIMESTAMP, (), status.last_success
        yield catalogue.EXPORTER_READ_ERRORS, (), status.read_errors

    def _start(self, metric: Metric, labels: tuple[str, ...]) -> str:
        key = (metric.name, labels)
        start = self._starts.get(key)
        if start is None:
            pairs = zip(metric.labels, (self._info.uuid, *labels), strict=True)
            text = ",".join(f'{name}="{escape(value)}"' for name, value in pairs)
            start = self._starts[key] = f"{metric.name}{{{text}}} "
        return start


def compose(blocks: Sequence[Block]) -> bytes:
    """The whole page from the blocks of all GPUs; families that no GPU has are left out."""
    parts: list[bytes] = []
    for header, lines in zip(_HEADERS, zip(*blocks, strict=True), strict=True):
        if any(lines):
            parts.append(header)
            parts.extend(lines)
    return b"".join(parts)


def escape(value: str) -> str:
    """A label's value as the text format wants it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def names(page: bytes) -> Iterable[str]:
    """The metric names on a page, for tests and for `orch doctor`."""
    return sorted({line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE")})
