"""The port between a vendor's driver and everything that watches GPUs.

A reader owns one GPU. It is used by one thread at a time, may block as long as its driver does (the caller must
tolerate that), and reports failures by one of two errors. Readers do not depend on jobs, files or networks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from orchestrator.gpu.sample import GpuInfo, Sample


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


@dataclass(slots=True)
class ReadTally:
    """Counts of the values that a reader had to leave out: they show how reliable a recording is."""

    zero_power: int = 0
    """Readings in which the power sensor reported 0 W or less; some drivers do when polled too often."""
    blank: int = 0
    """Values that were a vendor's mark for "no value" or impossible for hardware."""
    failed: int = 0
    """Single values that the driver refused this time."""


@dataclass(slots=True, kw_only=True)
class ReaderOptions:
    """Options of a reader beyond its sample."""

    processes: bool = False
    """Read which processes use the GPU and how much of its memory."""
    xids: bool = False
    """Watch for Xid events, where the vendor has them; costs a thread that blocks in the driver."""
    sparing: bool = False
    """Read values that take the driver long at some of the readings only, and repeat them at the others: for endless sampling."""
    tally: ReadTally = field(default_factory=ReadTally)


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
