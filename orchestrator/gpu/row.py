"""GPUs as JSON, the form of the API and of `orch gpus --json`; and read once, for commands that print once and end.

A row holds one GPU of one node: its identity, its condition, its newest values in base units, and the ranks on it.
Missing values are null. Rows travel between nodes and releases: a reader ignores unknown keys.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Self

from orchestrator.gpu.sample import GpuLostError, Sample, Vendor
from orchestrator.gpu.sampler import Health

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from orchestrator.gpu.sample import GpuInfo, GpuReader


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOwner:
    """A rank on a GPU."""

    job_id: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """One GPU of one node. `health` is one of `Health`; `sampled_at` is Unix time, None without a fresh sample.

    `condition` is ok, failing, quarantined or lost, `causes` are its facts, and `problem` is the most severe one in words.
    PCIe and NVLink are counters, NVLink's the sum over its links.
    `job_id` and `rank` name the first rank on the GPU, `holders` all of them: a GPU may be shared.
    """

    gpu_uuid: str
    node: str
    index: int
    vendor: str
    model: str
    pci_bus_id: str = ""
    driver_version: str = ""
    simulated: bool = False
    placeable: bool = True
    parent_uuid: str | None = None
    health: str = Health.OK
    problem: str | None = None
    condition: str = "ok"
    causes: tuple[dict[str, Any], ...] = ()
    job_id: str | None = None
    rank: int | None = None
    holders: tuple[GpuOwner, ...] = ()
    sampled_at: float | None = None
    utilization_ratio: float | None = None
    memory_activity_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    fan_ratio: float | None = None
    sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    pcie_transmit_bytes: int | None = None
    pcie_receive_bytes: int | None = None
    nvlink_transmit_bytes: int | None = None
    nvlink_receive_bytes: int | None = None
    throttle: tuple[str, ...] = ()
    processes: tuple[dict[str, int | None], ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values, nulls included, so that every row has the same keys."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Parse `to_json`'s form. Raises KeyError or TypeError for other forms."""
        known = {item.name for item in fields(cls)}
        values = {key: value for key, value in document.items() if key in known}
        holders = tuple(GpuOwner(**holder) for holder in values.get("holders", ()))
        tuples = {key: tuple(values.get(key, ())) for key in ("throttle", "processes", "causes")}
        return cls(**{**values, **tuples, "holders": holders})


def gpu_row(
    info: GpuInfo,
    node: str,
    sample: Sample | None,
    *,
    health: Health = Health.OK,
    problem: str | None = None,
    holders: Sequence[GpuOwner] = (),
) -> GpuRow:
    """Return the row of a GPU; `sample` is None for one that does not answer."""
    values = sample or Sample(gpu_uuid=info.uuid, timestamp=0.0, monotonic=0.0)
    clocks = dict(values.clocks)
    return GpuRow(
        gpu_uuid=info.uuid,
        node=node,
        index=info.index,
        vendor=info.vendor,
        model=info.model,
        pci_bus_id=info.pci_bus_id,
        driver_version=info.driver_version,
        simulated=info.simulated,
        placeable=info.placeable,
        parent_uuid=info.parent_uuid,
        health=health,
        problem=problem,
        job_id=holders[0].job_id if holders else None,
        rank=holders[0].rank if holders else None,
        holders=tuple(holders),
        sampled_at=values.timestamp if sample is not None else None,
        utilization_ratio=values.utilization,
        memory_activity_ratio=values.memory_activity,
        memory_used_bytes=values.memory_used_bytes,
        memory_total_bytes=values.memory_total_bytes or info.memory_total_bytes,
        power_watts=values.power_watts,
        power_limit_watts=values.power_limit_watts,
        energy_joules=values.energy_joules,
        temperature_celsius=values.temperature,
        fan_ratio=values.fan,
        sm_clock_hertz=clocks.get("sm", clocks.get("graphics")),
        memory_clock_hertz=clocks.get("memory", clocks.get("mem")),
        pcie_transmit_bytes=values.pcie_transmit_bytes,
        pcie_receive_bytes=values.pcie_receive_bytes,
        nvlink_transmit_bytes=_total(sent for _, sent, _ in values.nvlinks),
        nvlink_receive_bytes=_total(received for _, _, received in values.nvlinks),
        throttle=values.throttle_active,
        processes=tuple({"pid": process.pid, "memory_bytes": process.memory_bytes} for process in values.processes),
    )


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


DEADLINE_SECONDS: Final = 3.0
_TWICE: Final = frozenset({Vendor.INTEL, Vendor.SIMULATED})
"""Vendors whose utilization is a rate: it takes two readings, `_APART_SECONDS` apart."""
_APART_SECONDS: Final = 0.25


def read_once(readers: Sequence[GpuReader], node: str, deadline_seconds: float = DEADLINE_SECONDS) -> list[GpuRow]:
    """Return a row per reader, in their order, and close the readers. A GPU that does not answer in time is stale."""
    outcomes: dict[int, Sample | Exception] = {}

    def ask(number: int, reader: GpuReader) -> None:
        try:
            sample = reader.read()
            if reader.info.vendor in _TWICE:
                time.sleep(_APART_SECONDS)
                sample = reader.read()
            outcomes[number] = sample
        except Exception as error:
            outcomes[number] = error
        finally:
            reader.close()

    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in enumerate(readers)]
    deadline = time.monotonic() + deadline_seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    silent = TimeoutError(f"its driver has not answered within {deadline_seconds:g} s")
    return [_row(reader, node, outcomes.get(number, silent)) for number, reader in enumerate(readers)]


def _row(reader: GpuReader, node: str, outcome: Sample | Exception) -> GpuRow:
    if not isinstance(outcome, Exception):
        return gpu_row(reader.info, node, outcome)
    health = Health.FAILING
    if isinstance(outcome, GpuLostError):
        health = Health.LOST
    elif isinstance(outcome, TimeoutError):
        health = Health.STALE
    return gpu_row(reader.info, node, None, health=health, problem=str(outcome))
