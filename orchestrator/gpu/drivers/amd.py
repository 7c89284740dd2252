"""Reads AMD GPUs through amdgpu's files in /sys: no library, no ROCm installation.

Known problems avoided here: `pcie_bw` sleeps a second in the kernel, so PCIe traffic is not read; a GPU that is powered
down (runtime suspend) is not read, because that would wake it; power is the instantaneous sensor where the card has
one, else its average.
"""

from __future__ import annotations

import re
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.drivers import sysfs
from orchestrator.gpu.drivers.sysfs import Sensors, micro
from orchestrator.gpu.sample import Detail, GpuInfo, GpuLostError, ReaderOptions, Sample, Throttle, Vendor

if TYPE_CHECKING:
    from pathlib import Path


PCI_VENDOR: Final = "0x1002"
_DRIVER: Final = "amdgpu"
_CURRENT_STATE: Final = re.compile(r"^\d+:\s*(\d+)\s*Mhz\s*\*", re.MULTILINE | re.IGNORECASE)


def open_amd(root: Path, node: str) -> list[AmdReader]:
    """Return a reader for every AMD GPU under the /sys at `root`; empty where there is none."""
    version = sysfs.driver_version(root, _DRIVER)
    return [
        AmdReader(_describe(card, ordinal, node, version), card)
        for ordinal, card in enumerate(sysfs.cards(root, PCI_VENDOR, (_DRIVER,)))
    ]


def _describe(card: sysfs.Card, ordinal: int, node: str, version: str) -> GpuInfo:
    unique = sysfs.read_text(card.device / "unique_id")
    total = sysfs.read_text(card.device / "mem_info_vram_total")
    model = sysfs.read_text(card.device / "product_name") or sysfs.device_name(PCI_VENDOR, card.pci_device_id)
    return GpuInfo(
        uuid=f"amd-{unique}" if unique else f"amd-{node}-{card.pci_bus_id}",
        index=ordinal,
        ordinal=ordinal,
        vendor=Vendor.AMD,
        model=model or f"AMD GPU {card.pci_device_id}",
        memory_total_bytes=int(total) if total and total.isdigit() else None,
        pci_bus_id=card.pci_bus_id,
        driver_version=version,
    )


class AmdReader:
    """Reads one AMD GPU; see `orchestrator.gpu.sample.GpuReader`."""

    def __init__(self, info: GpuInfo, card: sysfs.Card, options: ReaderOptions | None = None) -> None:
        """Record the card; the first reading opens its files."""
        self.info = info
        self.options = options or ReaderOptions()
        self._card = card
        self._files = sysfs.Attributes()
        self._opened = False
        self._last_power: tuple[float | None, int] | None = None

    def read(self, detail: Detail = Detail.FULL) -> Sample:
        """Read the card's files; see `GpuReader.read`."""
        if not self._opened:
            self.reopen()
        start = time.perf_counter()
        sample = Sample(gpu_uuid=self.info.uuid, timestamp=time.time(), monotonic=time.monotonic())
        if not self._asleep():
            self._fill(sample, detail)
        sample.duration_seconds = time.perf_counter() - start
        return sample

    def _asleep(self) -> bool:
        return self._runtime is not None and self._runtime.text() == "suspended"

    def reopen(self) -> None:
        """Open the card's files anew. Raises GpuLostError when the card has gone."""
        self.close()
        device = self._card.device
        if not device.is_dir():
            raise GpuLostError(f"{device} has gone. Check the kernel log; the GPU needs a reset or a reboot.")
        self._runtime = self._files.open(device / "power" / "runtime_status")
        self._busy = self._files.open(device / "gpu_busy_percent")
        self._memory_busy = self._files.open(device / "mem_busy_percent")
        self._used = self._files.open(device / "mem_info_vram_used")
        self._metrics = self._files.open(device / "gpu_metrics")
        self._states = [
            (domain, self._files.open(device / name))
            for domain, name in (("graphics", "pp_dpm_sclk"), ("memory", "pp_dpm_mclk"))
        ]
        self._ecc = self._files.open(device / "ras" / "umc_err_count")
        self._sensors = Sensors(sysfs.hwmon(device, _DRIVER), self._files)
        self._power = self._sensors.open("power1_input", "power1_average")
        self._cap = self._sensors.open("power1_cap")
        self._opened = True

    def _fill(self, sample: Sample, detail: Detail) -> None:
        watts = micro(self._power)
        if watts is not None and watts <= 0.0:
            watts = None
        sample.power_watts = watts
        metrics = parse_metrics(self._metrics.bytes()) if self._metrics is not None else None
        now = (watts, metrics.stamp if metrics is not None else 0)
        sample.fresh = watts is not None and now != self._last_power
        self._last_power = now
        if detail is not Detail.POWER:
            self._load(sample)
        if detail is Detail.FULL:
            self._full(sample)
            if metrics is not None:
                sample.energy_joules, sample.throttle = metrics.energy_joules, metrics.throttle

    def _load(self, sample: Sample) -> None:
        sample.temperatures = self._sensors.temperatures()
        sample.utilization = self._percent(self._busy)
        sample.memory_activity = self._percent(self._memory_busy)
        sample.memory_used_bytes = self._used.number() if self._used is not None else None
        sample.memory_total_bytes = self.info.memory_total_bytes
        sample.clocks = self._sensors.clocks() or self._clock_states()

    def _percent(self, attribute: sysfs.Attribute | None) -> float | None:
        percent = attribute.number() if attribute is not None else None
        if percent is None:
            return None
        if not 0 <= percent <= 100:
            return None
        return percent / 100

    def _clock_states(self) -> tuple[tuple[str, float], ...]:
        """Read clocks from the list of states, whose current one has a star, for cards without hwmon clocks."""
        found: list[tuple[str, float]] = []
        for domain, attribute in self._states:
            match = _CURRENT_STATE.search(attribute.text() or "") if attribute is not None else None
            if match:
                found.append((domain, int(match[1]) * 1e6))
        return tuple(found)

    def _full(self, sample: Sample) -> None:
        cap = micro(self._cap)
        sample.power_limit_watts = cap or None
        sample.fan = self._sensors.fan()
        sample.temperature_limits = self._sensors.limits
        sample.ecc_errors = self._ecc_errors()

    def _ecc_errors(self) -> tuple[tuple[str, str, int], ...]:
        """Read memory errors since the driver was loaded, from lines such as `ue: 0` and `ce: 3`."""
        found: list[tuple[str, str, int]] = []
        names = {"ce": "corrected", "ue": "uncorrected"}
        for line in (self._ecc.text() or "").splitlines() if self._ecc is not None else ():
            key, _, value = line.partition(":")
            if key.strip() in names and value.strip().isdigit():
                found.append((names[key.strip()], "volatile", int(value)))
        return tuple(found)

    def close(self) -> None:
        """Close the card's files."""
        self._files.close()
        self._opened = False


_HEADER: Final = struct.Struct("<HBB")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_JOULES_PER_TICK: Final = 2.0**-16
_BLANK: Final = 0xFFFFFFFFFFFFFFFF

_FIRMWARE_TIME_1_3: Final = 96
_INDEPENDENT_THROTTLE_1_3: Final = 112
_ENERGY_1_4: Final = 24
_ENERGY_1_5: Final = 88
"""Version 1.5 added the activity of 32 JPEG engines at the beginning."""

_THROTTLE_BITS: Final = (
    (range(8), Throttle.POWER_CAP),
    (range(16, 24), Throttle.CURRENT),
    (range(32, 44), Throttle.THERMAL),
    (range(44, 48), Throttle.HARDWARE_THERMAL),
    (range(56, 58), Throttle.RELIABILITY),
)
"""Groups of bits of the throttle word that has the same meaning on every ASIC, and their reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdMetrics:
    """Values of amdgpu's binary table `gpu_metrics`: throttling by reason, energy, and a number that changes with the table.

    Layouts are the kernel's (kgd_pp_interface.h): version 1.3 on RDNA and MI200, 1.4 and later on MI300. Only values that
    no other file has are read. The energy accumulator is used from 1.4 on: earlier firmware counts in its own units, and
    monitors that used it reported impossible energies.
    """

    throttle: tuple[tuple[Throttle, bool], ...]
    energy_joules: float | None
    stamp: int


def parse_metrics(table: bytes | None) -> AmdMetrics | None:
    """Parse a table; None for an empty, truncated or unknown one."""
    if table is None or len(table) < _HEADER.size:
        return None
    size, major, minor = _HEADER.unpack_from(table)
    if major != 1 or len(table) < size:
        return None
    if minor == 3 and size >= _INDEPENDENT_THROTTLE_1_3 + _U64.size:
        (word,) = _U64.unpack_from(table, _INDEPENDENT_THROTTLE_1_3)
        (stamp,) = _U64.unpack_from(table, _FIRMWARE_TIME_1_3)
        throttle = () if word == _BLANK else _throttle(word)
        return AmdMetrics(throttle=throttle, energy_joules=None, stamp=stamp)
    if minor in {4, 5} and size >= 200:
        (ticks,) = _U64.unpack_from(table, _ENERGY_1_4 if minor == 4 else _ENERGY_1_5)
        energy = ticks * _JOULES_PER_TICK if 0 < ticks < _BLANK else None
        return AmdMetrics(throttle=(), energy_joules=energy, stamp=ticks)
    return None


def _throttle(word: int) -> tuple[tuple[Throttle, bool], ...]:
    return tuple((reason, any(word >> bit & 1 for bit in bits)) for bits, reason in _THROTTLE_BITS)
