"""Intel GPUs through the i915 and xe drivers' files in /sys.

Neither driver reports a percentage or watts: both are computed as rates, of a busy or idle counter and of an energy
counter, between two readings at least a tenth of a second apart (for a sooner one the last value is repeated and not
fresh). The first reading therefore has neither.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.drivers import sysfs
from orchestrator.gpu.drivers.sysfs import Sensors, first_labelled, micro
from orchestrator.gpu.sample import Detail, GpuInfo, GpuLostError, ReaderOptions, Sample, Throttle, Vendor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

PCI_VENDOR: Final = "0x8086"
RATE_SECONDS: Final = 0.1
"""Residency counters tick in milliseconds: over less time a rate is mostly rounding."""

_REASONS: Final = {
    "pl1": Throttle.POWER_CAP,
    "pl2": Throttle.POWER_CAP,
    "pl4": Throttle.CURRENT,
    "vr_tdc": Throttle.CURRENT,
    "thermal": Throttle.THERMAL,
    "ratl": Throttle.THERMAL,
    "prochot": Throttle.HARDWARE_THERMAL,
    "vr_thermalert": Throttle.HARDWARE_THERMAL,
}


def open_intel(root: Path, node: str) -> list[IntelReader]:
    """Return a reader for every Intel GPU under the /sys at `root`; empty where there is none."""
    return [
        IntelReader(_describe(root, card, ordinal, node), card)
        for ordinal, card in enumerate(sysfs.cards(root, PCI_VENDOR, ("i915", "xe")))
    ]


def _describe(root: Path, card: sysfs.Card, ordinal: int, node: str) -> GpuInfo:
    model = sysfs.device_name(PCI_VENDOR, card.pci_device_id)
    return GpuInfo(
        uuid=f"intel-{node}-{card.pci_bus_id}",
        index=ordinal,
        ordinal=ordinal,
        vendor=Vendor.INTEL,
        model=f"Intel {model}" if model else f"Intel GPU {card.pci_device_id}",
        memory_total_bytes=_memory_total(card),
        pci_bus_id=card.pci_bus_id,
        driver_version=sysfs.driver_version(root, card.driver),
    )


def _memory_total(card: sysfs.Card) -> int | None:
    """Return the device memory of all tiles; None for a GPU that shares the processor's memory."""
    paths = [*sorted(card.device.glob("tile*/vram*/total_bytes")), card.directory / "lmem_total_bytes"]
    if not any(path.is_file() for path in paths):
        paths = sorted(card.device.glob("tile*/physical_vram_size_bytes"))
    sizes = [int(text, 0) for text in map(sysfs.read_text, paths) if text]
    return sum(sizes) or None


@dataclass(slots=True)
class _Rate:
    """Utilization and power between two readings of the counters."""

    at: float | None = None
    counters: tuple[int, ...] = ()
    joules: float | None = None
    utilization: float | None = None
    watts: float | None = None


class IntelReader:
    """Reads one Intel GPU; see `orchestrator.gpu.sample.GpuReader`."""

    def __init__(
        self,
        info: GpuInfo,
        card: sysfs.Card,
        options: ReaderOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Record the card; the first reading opens its files. `clock` (monotonic seconds) is for tests."""
        self.info = info
        self.options = options or ReaderOptions()
        self._card = card
        self._clock = clock
        self._files = sysfs.Attributes()
        self._opened = False
        self._rate = _Rate()

    def read(self, detail: Detail = Detail.FULL) -> Sample:
        """Read the card's files; see `GpuReader.read`."""
        if not self._opened:
            self.reopen()
        wall, start = time.time(), time.perf_counter()
        now = self._clock()
        fresh = self._advance(now)
        load, full = detail is not Detail.POWER, detail is Detail.FULL
        used = self._memory_used() if load else None
        return Sample(
            gpu_uuid=self.info.uuid,
            timestamp=wall,
            monotonic=now,
            duration_seconds=time.perf_counter() - start,
            fresh=fresh,
            utilization=self._rate.utilization,
            memory_used_bytes=used,
            memory_total_bytes=self.info.memory_total_bytes if used is not None else None,
            power_watts=self._rate.watts,
            power_limit_watts=self._power_limit() if full else None,
            energy_joules=self._rate.joules if full else None,
            fan=self._sensors.fan() if full else None,
            temperatures=self._sensors.temperatures() if load else (),
            temperature_limits=self._sensors.limits if full else (),
            clocks=self._clocks() if load else (),
            throttle=self._throttle() if full else (),
        )

    def reopen(self) -> None:
        """Open the card's files anew. Raises GpuLostError when the card has gone."""
        self.close()
        card = self._card
        if not card.device.is_dir():
            raise GpuLostError(f"{card.device} has gone. Check the kernel log; the GPU needs a reset or a reboot.")
        self._sensors = Sensors(sysfs.hwmon(card.device, card.driver), self._files)
        channel = first_labelled(self._sensors, "energy", ("card", "pkg"))
        self._energy = self._sensors.open(f"energy{channel}_input") if channel else None
        self._limit = self._sensors.open(
            *(f"power{n}_{kind}" for kind in ("max", "rated_max") for n in (channel or 1, 2))
        )
        self._busy = self._open_all(card.device.glob("tile*/gt*/engines/*/busy_ns")) or self._open_all(
            card.directory.glob("engine/*/busy")
        )
        self._idle = self._open_all(card.device.glob("tile*/gt*/gtidle/idle_residency_ms")) or self._open_all(
            (*card.directory.glob("gt/gt*/rc6_residency_ms"), card.directory / "power" / "rc6_residency_ms")
        )
        self._used = self._open_all(card.device.glob("tile*/vram*/used_bytes"))
        self._available = self._files.open(card.directory / "lmem_avail_bytes")
        self._frequency = self._files.open(
            card.device / "tile0/gt0/freq0/act_freq",
            card.directory / "gt/gt0/rps_act_freq_mhz",
            card.directory / "gt_act_freq_mhz",
        )
        self._open_throttle()
        self._rate = _Rate()
        self._opened = True

    def _open_all(self, paths: Iterable[Path]) -> list[sysfs.Attribute]:
        opened = (self._files.open(path) for path in sorted(paths))
        return [attribute for attribute in opened if attribute is not None]

    def _open_throttle(self) -> None:
        self._reasons: list[tuple[Throttle, sysfs.Attribute]] = []
        for name, reason in _REASONS.items():
            attribute = self._files.open(
                self._card.device / f"tile0/gt0/freq0/throttle/reason_{name}",
                self._card.directory / f"gt/gt0/throttle_reason_{name}",
            )
            if attribute is not None:
                self._reasons.append((reason, attribute))

    def _advance(self, now: float) -> bool:
        """Update utilization and power when enough time has passed; return whether it did."""
        rate = self._rate
        elapsed = None if rate.at is None else now - rate.at
        if elapsed is not None and elapsed < 0.95 * RATE_SECONDS:
            return False
        counters = tuple(attribute.number() or 0 for attribute in (self._busy or self._idle))
        joules = micro(self._energy)
        if elapsed is not None:
            rate.utilization = self._utilization(counters, elapsed)
            rate.watts = None
            if joules is not None and rate.joules is not None and joules >= rate.joules:
                rate.watts = (joules - rate.joules) / elapsed
        rate.at, rate.counters, rate.joules = now, counters, joules
        return True

    def _utilization(self, counters: tuple[int, ...], elapsed: float) -> float | None:
        """Return the busiest engine, or the least idle GT; None where the driver counts neither or was reset."""
        if not counters or len(counters) != len(self._rate.counters):
            return None
        deltas = [new - old for new, old in zip(counters, self._rate.counters, strict=True)]
        if min(deltas) < 0:
            return None
        if self._busy:
            return min(1.0, max(deltas) / 1e9 / elapsed)
        return min(1.0, max(0.0, 1.0 - min(deltas) / 1e3 / elapsed))

    def _memory_used(self) -> int | None:
        if self._used:
            return sum(attribute.number() or 0 for attribute in self._used)
        available = self._available.number() if self._available is not None else None
        total = self.info.memory_total_bytes
        return total - available if available is not None and total is not None else None

    def _power_limit(self) -> float | None:
        limit = micro(self._limit)
        return limit or None  # 0 means that the limit is disabled

    def _clocks(self) -> tuple[tuple[str, float], ...]:
        megahertz = self._frequency.number() if self._frequency is not None else None
        return (("graphics", megahertz * 1e6),) if megahertz is not None else ()

    def _throttle(self) -> tuple[tuple[Throttle, bool], ...]:
        states: dict[Throttle, bool] = {}
        for reason, attribute in self._reasons:
            states[reason] = states.get(reason, False) or attribute.number() == 1
        return tuple(states.items())

    def close(self) -> None:
        """Close the card's files."""
        self._files.close()
        self._opened = False
