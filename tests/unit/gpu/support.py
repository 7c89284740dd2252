"""Helpers of the GPU tests: short constructors of samples, a reader driven by hand, waiting with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from orchestrator.gpu.sample import Detail, GpuInfo, GpuProcess, ReaderOptions, Sample, Throttle, Vendor, XidCount
from tests.support.stack import PATIENCE_SECONDS


def gpu_info(uuid: str = "GPU-a", index: int = 0, **changes: Any) -> GpuInfo:
    values: dict[str, Any] = {
        "uuid": uuid,
        "index": index,
        "ordinal": index,
        "vendor": Vendor.NVIDIA,
        "model": "NVIDIA H100",
        "memory_total_bytes": 80 << 30,
        "pci_bus_id": f"0000:{index + 1:02x}:00.0",
        "driver_version": "580.65.06",
    }
    return GpuInfo(**{**values, **changes})


def sample(uuid: str = "GPU-a", at: float = 100.0, **values: Any) -> Sample:
    return Sample(gpu_uuid=uuid, timestamp=1.7e9 + at, monotonic=at, **values)


def full_sample() -> Sample:
    """Return a sample with every possible value."""
    return sample(
        duration_seconds=0.0012,
        utilization=0.5,
        memory_activity=0.25,
        memory_used_bytes=10 << 30,
        memory_total_bytes=80 << 30,
        power_watts=300.5,
        power_limit_watts=700.0,
        energy_joules=1234.5,
        fan=0.4,
        pcie_transmit_bytes=2**53,
        pcie_receive_bytes=7,
        temperatures=(("gpu", 55.0), ("memory", 62.0)),
        temperature_limits=(("gpu", "slowdown", 89.0),),
        clocks=(("sm", 1.98e9),),
        throttle=((Throttle.THERMAL, True), (Throttle.POWER_CAP, False)),
        throttle_seconds=((Throttle.THERMAL, 2.5),),
        ecc_errors=(("uncorrected", "volatile", 3),),
        remapped_rows=(("pending", 1),),
        nvlinks=((0, 1024, 2048), (1, None, 4096)),
        xids=(XidCount(code=79, count=2, last_timestamp=1.7e9),),
        processes=(GpuProcess(pid=4711, memory_bytes=5), GpuProcess(pid=4712, memory_bytes=None)),
    )


def wait_for(condition: Callable[[], Any], what: str, timeout: float = PATIENCE_SECONDS) -> Any:
    """Poll until `condition` returns a true value, and return it; fail the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.005)
    return result


class ScriptedReader:
    """A GPU with answers that a test sets: a power value, an error, or no answer until released."""

    def __init__(self, uuid: str) -> None:
        self.info = gpu_info(uuid)
        self.options = ReaderOptions()
        self.power = 300.0
        self.error: Exception | None = None
        self.reads = 0
        self.reopened = 0
        self.closed = threading.Event()
        self._free = threading.Event()
        self._free.set()

    def hang(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    def read(self, detail: Detail = Detail.FULL) -> Sample:
        self.reads += 1
        wall, start = time.time(), time.monotonic()
        self._free.wait()
        if self.error is not None:
            raise self.error
        return Sample(gpu_uuid=self.info.uuid, timestamp=wall, monotonic=start, power_watts=self.power, utilization=0.5)

    def reopen(self) -> None:
        self.reopened += 1

    def close(self) -> None:
        self.closed.set()
