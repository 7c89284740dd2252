"""Fake /sys trees of graphics cards, with the files that real cards of several generations have.

Layouts follow the kernel's documentation of amdgpu, i915 and xe; values are plausible and round. They were not captured
from hardware.
"""

from __future__ import annotations

import struct
from pathlib import Path


def write(directory: Path, files: dict[str, object]) -> None:
    """Write each file below `directory`; bytes as they are, everything else as a line of text."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(f"{content}\n", encoding="utf-8")


class FakeCard:
    """A card below a fake /sys: `card` is its directory under class/drm, `device` that of its PCI device."""

    def __init__(self, root: Path, number: int, driver: str, bus: str, vendor: str, device: str) -> None:
        self.device = root / "devices" / "pci0000:00" / bus
        self.card = root / "class" / "drm" / f"card{number}"
        self.device.mkdir(parents=True)
        self.card.mkdir(parents=True)
        (self.card / "device").symlink_to(self.device)
        (root / "bus" / "pci" / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (self.device / "driver").symlink_to(root / "bus" / "pci" / "drivers" / driver)
        write(self.device, {"vendor": vendor, "device": device})
        # Connectors and render nodes are in the same directory and are not cards.
        (root / "class" / "drm" / f"card{number}-DP-1").mkdir()
        (root / "class" / "drm" / f"renderD{128 + number}").mkdir()

    def set(self, files: dict[str, object]) -> None:
        """Write files of the PCI device."""
        write(self.device, files)

    def set_card(self, files: dict[str, object]) -> None:
        """Write files of the card's own directory."""
        write(self.card, files)


def gpu_metrics_1_3(*, throttle: int = 0, firmware_time: int = 1, energy: int = 0) -> bytes:
    """Return a table of version 1.3, as RDNA and MI200 have it."""
    table = bytearray(120)
    struct.pack_into("<HBB", table, 0, len(table), 1, 3)
    struct.pack_into("<Q", table, 24, energy)
    struct.pack_into("<Q", table, 96, firmware_time)
    struct.pack_into("<Q", table, 112, throttle)
    return bytes(table)


def gpu_metrics_1_4(*, energy_ticks: int) -> bytes:
    """Return a table of version 1.4, as MI300 has it."""
    table = bytearray(288)
    struct.pack_into("<HBB", table, 0, len(table), 1, 4)
    struct.pack_into("<Q", table, 24, energy_ticks)
    return bytes(table)


def polaris(root: Path, number: int = 0, bus: str = "0000:01:00.0") -> FakeCard:
    """Create an RX 580 (gfx8): one sensor, average power, no memory activity, no metrics table, no unique id."""
    card = FakeCard(root, number, "amdgpu", bus, "0x1002", "0x67df")
    card.set(
        {
            "gpu_busy_percent": 63,
            "mem_info_vram_total": 8 << 30,
            "mem_info_vram_used": 3 << 30,
            "pp_dpm_sclk": "0: 300Mhz\n1: 608Mhz\n2: 1340Mhz *",
            "pp_dpm_mclk": "0: 300Mhz\n1: 2000Mhz *",
            "hwmon/hwmon3/name": "amdgpu",
            "hwmon/hwmon3/temp1_input": 64000,
            "hwmon/hwmon3/temp1_label": "edge",
            "hwmon/hwmon3/temp1_crit": 94000,
            "hwmon/hwmon3/power1_average": 145_000_000,
            "hwmon/hwmon3/power1_cap": 185_000_000,
            "hwmon/hwmon3/pwm1": 102,
            "hwmon/hwmon3/pwm1_max": 255,
        }
    )
    return card


def navi31(root: Path, number: int = 0, bus: str = "0000:03:00.0") -> FakeCard:
    """Create a Radeon Pro W7900 (gfx11): three sensors, clocks in hwmon, metrics table 1.3."""
    card = FakeCard(root, number, "amdgpu", bus, "0x1002", "0x7448")
    card.set(
        {
            "unique_id": "f1f3a0c2d4e5b697",
            "product_name": "AMD Radeon Pro W7900",
            "gpu_busy_percent": 97,
            "mem_busy_percent": 41,
            "mem_info_vram_total": 48 << 30,
            "mem_info_vram_used": 20 << 30,
            "gpu_metrics": gpu_metrics_1_3(),
            "power/runtime_status": "active",
            "ras/umc_err_count": "ue: 0\nce: 3",
            "hwmon/hwmon5/name": "amdgpu",
            "hwmon/hwmon5/temp1_input": 61000,
            "hwmon/hwmon5/temp1_label": "edge",
            "hwmon/hwmon5/temp2_input": 79000,
            "hwmon/hwmon5/temp2_label": "junction",
            "hwmon/hwmon5/temp2_crit": 110000,
            "hwmon/hwmon5/temp2_emergency": 115000,
            "hwmon/hwmon5/temp3_input": 72000,
            "hwmon/hwmon5/temp3_label": "mem",
            "hwmon/hwmon5/power1_average": 241_000_000,
            "hwmon/hwmon5/power1_input": 250_000_000,
            "hwmon/hwmon5/power1_cap": 295_000_000,
            "hwmon/hwmon5/freq1_input": 2_495_000_000,
            "hwmon/hwmon5/freq1_label": "sclk",
            "hwmon/hwmon5/freq2_input": 1_124_000_000,
            "hwmon/hwmon5/freq2_label": "mclk",
            "hwmon/hwmon5/fan1_input": 1500,
            "hwmon/hwmon5/fan1_max": 3000,
        }
    )
    return card


def mi300x(root: Path, number: int = 0, bus: str = "0000:05:00.0") -> FakeCard:
    """Create an MI300X (gfx9.4.3): no edge sensor, no fan, instantaneous power only, metrics table 1.4 with energy."""
    card = FakeCard(root, number, "amdgpu", bus, "0x1002", "0x74a1")
    card.set(
        {
            "unique_id": "39deadbeef0badc0",
            "product_name": "AMD Instinct MI300X OAM",
            "gpu_busy_percent": 100,
            "mem_busy_percent": 55,
            "mem_info_vram_total": 192 << 30,
            "mem_info_vram_used": 150 << 30,
            "gpu_metrics": gpu_metrics_1_4(energy_ticks=65536 * 1000),
            "ras/umc_err_count": "ue: 1\nce: 12\nde: 4",
            "hwmon/hwmon7/name": "amdgpu",
            "hwmon/hwmon7/temp2_input": 67000,
            "hwmon/hwmon7/temp2_label": "junction",
            "hwmon/hwmon7/temp3_input": 58000,
            "hwmon/hwmon7/temp3_label": "mem",
            "hwmon/hwmon7/power1_input": 612_000_000,
            "hwmon/hwmon7/power1_cap": 750_000_000,
        }
    )
    return card


def iris_xe(root: Path, number: int = 0, bus: str = "0000:00:02.0") -> FakeCard:
    """Create an integrated Iris Xe (i915): residency and clocks, no sensors and no memory of its own."""
    card = FakeCard(root, number, "i915", bus, "0x8086", "0x9a49")
    card.set_card({"gt/gt0/rc6_residency_ms": 100_000, "gt_act_freq_mhz": 300, "gt/gt0/rps_act_freq_mhz": 1250})
    return card


def arc_a770(root: Path, number: int = 0, bus: str = "0000:08:00.0") -> FakeCard:
    """Create an Arc A770 (i915): energy and power limit in hwmon, local memory, throttle reasons."""
    card = FakeCard(root, number, "i915", bus, "0x8086", "0x56a0")
    card.set_card(
        {
            "gt/gt0/rc6_residency_ms": 500_000,
            "gt/gt0/rps_act_freq_mhz": 2100,
            "gt/gt0/throttle_reason_status": 1,
            "gt/gt0/throttle_reason_pl1": 1,
            "gt/gt0/throttle_reason_pl2": 0,
            "gt/gt0/throttle_reason_pl4": 0,
            "gt/gt0/throttle_reason_thermal": 0,
            "gt/gt0/throttle_reason_prochot": 0,
            "lmem_total_bytes": 16 << 30,
            "lmem_avail_bytes": 12 << 30,
        }
    )
    card.set(
        {
            "hwmon/hwmon2/name": "i915",
            "hwmon/hwmon2/energy1_input": 50_000_000_000,
            "hwmon/hwmon2/power1_max": 190_000_000,
            "hwmon/hwmon2/fan1_input": 1200,
            "hwmon/hwmon2/temp1_input": 58000,
        }
    )
    return card


def battlemage(root: Path, number: int = 0, bus: str = "0000:0a:00.0") -> FakeCard:
    """Create an Arc B580 (xe): package and card energy, temperatures from temp2 on, idle residency per GT."""
    card = FakeCard(root, number, "xe", bus, "0x8086", "0xe20b")
    card.set(
        {
            "tile0/gt0/gtidle/idle_residency_ms": 10_000,
            "tile0/gt1/gtidle/idle_residency_ms": 20_000,
            "tile0/gt0/freq0/act_freq": 2650,
            "tile0/gt0/freq0/throttle/status": 1,
            "tile0/gt0/freq0/throttle/reason_pl1": 0,
            "tile0/gt0/freq0/throttle/reason_thermal": 1,
            "tile0/vram0/total_bytes": 12 << 30,
            "tile0/vram0/used_bytes": 5 << 30,
            "hwmon/hwmon4/name": "xe",
            "hwmon/hwmon4/energy1_input": 9_000_000,
            "hwmon/hwmon4/energy1_label": "pkg",
            "hwmon/hwmon4/energy2_input": 30_000_000,
            "hwmon/hwmon4/energy2_label": "card",
            "hwmon/hwmon4/power2_max": 0,
            "hwmon/hwmon4/power2_label": "card",
            "hwmon/hwmon4/temp2_input": 55000,
            "hwmon/hwmon4/temp2_label": "pkg",
            "hwmon/hwmon4/temp3_input": 62000,
            "hwmon/hwmon4/temp3_label": "vram",
            "hwmon/hwmon4/temp3_crit": 105000,
        }
    )
    return card


def ponte_vecchio(root: Path, number: int = 0, bus: str = "0000:29:00.0") -> FakeCard:
    """Create a Data Center GPU Max (xe): two tiles with memory of their own, busy counters per engine."""
    card = FakeCard(root, number, "xe", bus, "0x8086", "0x0bd5")
    for tile in range(2):
        card.set(
            {
                f"tile{tile}/gt{tile}/engines/ccs0/busy_ns": 1_000_000_000,
                f"tile{tile}/gt{tile}/engines/bcs0/busy_ns": 2_000_000_000,
                f"tile{tile}/vram{tile}/total_bytes": 64 << 30,
                f"tile{tile}/vram{tile}/used_bytes": (10 + tile) << 30,
            }
        )
    card.set(
        {
            "tile0/gt0/freq0/act_freq": 1600,
            "hwmon/hwmon6/name": "xe",
            "hwmon/hwmon6/energy1_input": 77_000_000,
            "hwmon/hwmon6/energy1_label": "card",
            "hwmon/hwmon6/power1_max": 600_000_000,
        }
    )
    return card
