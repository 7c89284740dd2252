"""A GPU's identity and one reading of it, in one schema for every vendor.

Base units throughout: ratios from 0 to 1, bytes, watts, joules, degrees Celsius, hertz, seconds, Unix time. A value that
the GPU, its driver or its sensor does not give is `None` or missing from its tuple: never 0, never a sentinel. This
module holds plain values only; it opens no device and reads no clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol


class Vendor(enum.StrEnum):
    """The GPU's maker; `simulated` runs on processor time, which every label shows."""

    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    SIMULATED = "simulated"


class Throttle(enum.StrEnum):
    """Reasons for which clocks are reduced: the vendors' many flags, mapped to common terms."""

    POWER_CAP = "power_cap"
    THERMAL = "thermal"
    HARDWARE_THERMAL = "hardware_thermal"
    HARDWARE_SLOWDOWN = "hardware_slowdown"
    POWER_BRAKE = "power_brake"
    CURRENT = "current"
    SYNC_BOOST = "sync_boost"
    RELIABILITY = "reliability"
    CLOCK_SETTING = "clock_setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """Identity of a GPU, constant while its driver is loaded.

    `index` counts the GPUs of the host over all vendors; `ordinal` is the position of a physical GPU among its vendor's,
    which is what `CUDA_VISIBLE_DEVICES` and its like count. A MIG device names the GPU it is a part of in `parent_uuid`;
    that GPU is then `partitioned`: it is still watched, but nothing can be placed on it as a whole.
    """

    uuid: str
    index: int
    ordinal: int
    vendor: Vendor
    model: str
    memory_total_bytes: int | None
    pci_bus_id: str
    driver_version: str
    simulated: bool = False
    parent_uuid: str | None = None
    partitioned: bool = False

    @property
    def placeable(self) -> bool:
        """Whether a job can be given this GPU."""
        return not self.partitioned


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process with a context on the GPU; `memory_bytes` is None where the driver does not report it."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class XidCount:
    """Xid events of one code seen since the reader was opened."""

    code: int
    count: int
    last_timestamp: float


@dataclass(slots=True, kw_only=True)
class Sample:
    """One reading of one GPU; only its reader sets values, before it returns the sample.

    `timestamp` (Unix time) and `monotonic` mark the beginning of the reading, `duration_seconds` is its duration.
    `driver_timestamp` is the driver's own time of the power value, where it gives one. `fresh` is False when the driver
    repeated a power value that it had returned before: it distinguishes the sensor's update rate from the rate at which
    it was read.
    """

    gpu_uuid: str
    timestamp: float
    monotonic: float
    duration_seconds: float = 0.0
    driver_timestamp: float | None = None
    fresh: bool = True

    utilization: float | None = None
    memory_activity: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    fan: float | None = None
    pcie_transmit_bytes: int | None = None
    pcie_receive_bytes: int | None = None

    temperatures: tuple[tuple[str, float], ...] = ()
    """(sensor, degrees)."""
    temperature_limits: tuple[tuple[str, str, float], ...] = ()
    """(sensor, limit, degrees)."""
    clocks: tuple[tuple[str, float], ...] = ()
    """(domain, hertz)."""
    throttle: tuple[tuple[Throttle, bool], ...] = ()
    """(reason, active); only the reasons that this GPU can report."""
    throttle_seconds: tuple[tuple[Throttle, float], ...] = ()
    """(reason, seconds since the driver was loaded)."""
    ecc_errors: tuple[tuple[str, str, int], ...] = ()
    """(severity, scope, count)."""
    remapped_rows: tuple[tuple[str, int], ...] = ()
    """(cause, rows)."""
    nvlinks: tuple[tuple[int, int | None, int | None], ...] = ()
    """(link, bytes sent, bytes received)."""
    xids: tuple[XidCount, ...] = ()
    processes: tuple[GpuProcess, ...] = ()

    @property
    def temperature(self) -> float | None:
        """The temperature that stands for the GPU: its own sensor, else its edge, else its hottest; degrees or None."""
        by_sensor = dict(self.temperatures)
        for sensor in ("gpu", "edge"):
            if sensor in by_sensor:
                return by_sensor[sensor]
        return max(by_sensor.values(), default=None)

    @property
    def throttle_active(self) -> tuple[Throttle, ...]:
        """The reasons for which the clocks are reduced now."""
        return tuple(reason for reason, active in self.throttle if active)


class GpuReadError(Exception):
    """A reading failed as a whole; the next one may succeed."""


class GpuLostError(GpuReadError):
    """The driver no longer has this GPU. Look for Xid 79 in the kernel log; it takes a reset or a reboot."""


class Detail(enum.Enum):
    """Extent of a reading; each level includes the previous one.

    `POWER` is the power, which changes within milliseconds. `LOAD` adds what a driver renews a few times a second: utilization,
    memory in use, clocks, temperatures. `FULL` is all that the exporter publishes, also counters whose driver call is
    slow (energy, PCIe, NVLink, ECC).
    """

    POWER = 1
    LOAD = 2
    FULL = 3


@dataclass(slots=True, kw_only=True)
class ReaderOptions:
    """Options of a reader beyond its sample."""

    processes: bool = False
    """Read which processes use the GPU and how much of its memory."""
    xids: bool = False
    """Watch for Xid events, where the vendor has them; costs a thread that blocks in the driver."""
    sparing: bool = False
    """Read values that take the driver long at some of the readings only, and repeat them at the others: for endless sampling."""


class GpuReader(Protocol):
    """Reads one GPU."""

    info: GpuInfo
    """Identity, read once when the reader was created."""
    options: ReaderOptions
    """The reader's options; callers may change them between readings."""

    def read(self, detail: Detail = Detail.FULL) -> Sample:
        """Query the driver now. Raises `GpuLostError` or `GpuReadError`; single missing values are absent."""

    def reopen(self) -> None:
        """Open the GPU again after it failed. Raises as `read` does."""

    def close(self) -> None:
        """Release the driver. Never raises. Idempotent."""
