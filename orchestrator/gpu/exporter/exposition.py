"""Samples as Prometheus text, by the names of the catalogue.

Each GPU renders a block: the lines of its series, one entry per metric family. `compose` puts the blocks of several GPUs
together with the families' headers, because the format requires a family's lines side by side. A value that a sample
does not have yields no line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from orchestrator import catalogue
from orchestrator.catalogue import METRICS, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from orchestrator.gpu.sample import GpuInfo, GpuProcess, Sample, XidCount

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
    """State of an exporter itself for one GPU; times in seconds of Unix time, None for never."""

    up: bool
    last_success: float | None
    read_errors: int


def _one(metric: Metric) -> Callable[[Any], Iterator[Series]]:
    """Return a function that yields the series of a single value; none where the value is absent."""

    def series(value: float | None) -> Iterator[Series]:
        if value is not None:
            yield metric, (), value

    return series


def _rows(metric: Metric) -> Callable[[Any], Iterator[Series]]:
    """Return a function that yields the series of rows that hold labels and, last, a value."""

    def series(rows: Iterable[tuple[Any, ...]]) -> Iterator[Series]:
        for *labels, value in rows:
            yield metric, tuple(labels), value

    return series


def _throttle(states: Iterable[tuple[str, bool]]) -> Iterator[Series]:
    for reason, active in states:
        yield catalogue.GPU_THROTTLE_ACTIVE, (reason,), int(active)


def _nvlinks(links: Iterable[tuple[int, int | None, int | None]]) -> Iterator[Series]:
    for link, sent, received in links:
        if sent is not None:
            yield catalogue.GPU_NVLINK_TRANSMIT, (str(link),), sent
        if received is not None:
            yield catalogue.GPU_NVLINK_RECEIVE, (str(link),), received


def _processes(processes: Iterable[GpuProcess]) -> Iterator[Series]:
    for process in processes:
        if process.memory_bytes is not None:
            yield catalogue.GPU_PROCESS_MEMORY, (str(process.pid),), process.memory_bytes


def _xids(xids: Iterable[XidCount]) -> Iterator[Series]:
    for xid in xids:
        yield catalogue.GPU_XID_ERRORS, (str(xid.code),), xid.count
        yield catalogue.GPU_XID_LAST_TIMESTAMP, (str(xid.code),), xid.last_timestamp


@dataclass(frozen=True, slots=True)
class Part:
    """One value of a sample or status, the function of its series, and their families; no two parts share a family."""

    attribute: str
    series: Callable[[Any], Iterator[Series]]
    families: tuple[Metric, ...]


def _simple(make: Callable[[Metric], Callable[[Any], Iterator[Series]]], attribute: str, metric: Metric) -> Part:
    return Part(attribute, make(metric), (metric,))


SAMPLE_PARTS: Final = (
    _simple(_one, "utilization", catalogue.GPU_UTILIZATION),
    _simple(_one, "memory_activity", catalogue.GPU_MEMORY_ACTIVITY),
    _simple(_one, "memory_used_bytes", catalogue.GPU_MEMORY_USED),
    _simple(_one, "memory_total_bytes", catalogue.GPU_MEMORY_TOTAL),
    _simple(_one, "power_watts", catalogue.GPU_POWER),
    _simple(_one, "power_limit_watts", catalogue.GPU_POWER_LIMIT),
    _simple(_one, "energy_joules", catalogue.GPU_ENERGY),
    _simple(_one, "fan", catalogue.GPU_FAN),
    _simple(_one, "pcie_transmit_bytes", catalogue.GPU_PCIE_TRANSMIT),
    _simple(_one, "pcie_receive_bytes", catalogue.GPU_PCIE_RECEIVE),
    _simple(_one, "duration_seconds", catalogue.EXPORTER_COLLECT_DURATION),
    _simple(_rows, "temperatures", catalogue.GPU_TEMPERATURE),
    _simple(_rows, "temperature_limits", catalogue.GPU_TEMPERATURE_LIMIT),
    _simple(_rows, "clocks", catalogue.GPU_CLOCK),
    _simple(_rows, "throttle_seconds", catalogue.GPU_THROTTLE),
    _simple(_rows, "ecc_errors", catalogue.GPU_ECC_ERRORS),
    _simple(_rows, "remapped_rows", catalogue.GPU_REMAPPED_ROWS),
    Part("throttle", _throttle, (catalogue.GPU_THROTTLE_ACTIVE,)),
    Part("nvlinks", _nvlinks, (catalogue.GPU_NVLINK_TRANSMIT, catalogue.GPU_NVLINK_RECEIVE)),
    Part("xids", _xids, (catalogue.GPU_XID_ERRORS, catalogue.GPU_XID_LAST_TIMESTAMP)),
)
PROCESS_PART: Final = Part("processes", _processes, (catalogue.GPU_PROCESS_MEMORY,))
STATUS_PARTS: Final = (
    _simple(_one, "last_success", catalogue.EXPORTER_LAST_SUCCESS_TIMESTAMP),
    _simple(_one, "read_errors", catalogue.EXPORTER_READ_ERRORS),
)


class Renderer:
    """Renders one GPU's samples. Most values do not change from one sample to the next: their lines are kept."""

    def __init__(self, info: GpuInfo, node: str, *, processes: bool = False) -> None:
        """Render for this GPU on this node; a series for every process only with `processes`."""
        self._info = info
        self._node = node
        self._sample_parts = (*SAMPLE_PARTS, PROCESS_PART) if processes else SAMPLE_PARTS
        self._starts: dict[tuple[str, tuple[str, ...]], str] = {}
        self._seen: dict[str, Any] = {}
        """The value from which each part's lines were made."""
        self._lines: dict[str, list[tuple[int, bytes]]] = {}
        """Each part's lines, each with its family's place."""
        vendor = (str(info.index), node, info.vendor, info.model, info.pci_bus_id, info.driver_version)
        self._identity = (_POSITION[catalogue.GPU_INFO.name], self._line((catalogue.GPU_INFO, vendor, 1)).encode())
        self._up = {up: self._up_line(up=up) for up in (True, False)}

    def block(self, sample: Sample | None, status: ExporterStatus) -> Block:
        """Return the GPU's lines; without a sample only the exporter's own, which report that the GPU is not up."""
        families = [b""] * len(FAMILIES)
        if sample is not None and status.up:
            place, line = self._identity
            families[place] = line
            for part in self._sample_parts:
                for place, line in self._rendered(part, getattr(sample, part.attribute)):
                    families[place] = line
        for part in STATUS_PARTS:
            for place, line in self._rendered(part, getattr(status, part.attribute)):
                families[place] = line
        families[_POSITION[catalogue.EXPORTER_UP.name]] = self._up[status.up]
        return tuple(families)

    def _rendered(self, part: Part, value: Any) -> list[tuple[int, bytes]]:
        """Return the part's lines by family; the previous ones while the value is the same."""
        if part.attribute in self._seen and value == self._seen[part.attribute]:
            return self._lines[part.attribute]
        texts: dict[str, list[str]] = {metric.name: [] for metric in part.families}
        for series in part.series(value):
            texts[series[0].name].append(self._line(series))
        self._seen[part.attribute] = value
        lines = [(_POSITION[name], "".join(parts).encode()) for name, parts in texts.items()]
        self._lines[part.attribute] = lines
        return lines

    def _up_line(self, *, up: bool) -> bytes:
        return self._line((catalogue.EXPORTER_UP, (str(self._info.index), self._node), int(up))).encode()

    def _line(self, series: Series) -> str:
        metric, labels, value = series
        return f"{self._start(metric, labels)}{value!r}\n"

    def _start(self, metric: Metric, labels: tuple[str, ...]) -> str:
        """Return a line up to its value; this text is made once."""
        key = (metric.name, labels)
        start = self._starts.get(key)
        if start is None:
            pairs = zip(metric.labels, (self._info.uuid, *labels), strict=True)
            text = ",".join(f'{name}="{escape(value)}"' for name, value in pairs)
            start = self._starts[key] = f"{metric.name}{{{text}}} "
        return start


def compose(blocks: Sequence[Block]) -> bytes:
    """Return the whole page from the blocks of all GPUs; families that no GPU has are left out."""
    parts: list[bytes] = []
    for header, lines in zip(_HEADERS, zip(*blocks, strict=True), strict=True):
        if any(lines):
            parts.append(header)
            parts.extend(lines)
    return b"".join(parts)


def escape(value: str) -> str:
    """Escape a label's value as the text format requires."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def names(page: bytes) -> Iterable[str]:
    """Return the metric names on a page, for tests and for `orch doctor`."""
    return sorted({line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE")})
