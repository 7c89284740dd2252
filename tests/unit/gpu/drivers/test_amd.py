"""AMD GPUs from fake /sys trees of three generations."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from orchestrator.gpu.drivers.amd import AmdReader, open_amd
from orchestrator.gpu.sample import Detail, GpuLostError, Throttle, Vendor
from tests.support import fake_sysfs


def only(root: Path) -> AmdReader:
    (reader,) = open_amd(root, "node1")
    return reader


def test_polaris_has_what_its_driver_gives(tmp_path: Path) -> None:
    fake_sysfs.polaris(tmp_path)
    reader = only(tmp_path)
    assert reader.info.vendor is Vendor.AMD
    assert reader.info.uuid == "amd-node1-0000:01:00.0", "no unique id: the node and the slot name it"
    assert reader.info.pci_bus_id == "0000:01:00.0"
    sample = reader.read()
    assert sample.utilization == 0.63
    assert sample.memory_activity is None
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (3 << 30, 8 << 30)
    assert (sample.power_watts, sample.power_limit_watts) == (145.0, 185.0)
    assert sample.temperatures == (("edge", 64.0),)
    assert sample.temperature == 64.0
    assert sample.temperature_limits == (("edge", "critical", 94.0),)
    assert sample.clocks == (("graphics", 1.34e9), ("memory", 2e9))
    assert sample.fan == 0.4
    assert (sample.energy_joules, sample.throttle, sample.ecc_errors) == (None, (), ())
    reader.close()


def test_navi31_prefers_instantaneous_power_and_reads_throttling(tmp_path: Path) -> None:
    card = fake_sysfs.navi31(tmp_path)
    card.set({"gpu_metrics": fake_sysfs.gpu_metrics_1_3(throttle=1 << 0 | 1 << 36, energy=12345)})
    reader = only(tmp_path)
    assert reader.info.uuid == "amd-f1f3a0c2d4e5b697"
    assert reader.info.model == "AMD Radeon Pro W7900"
    sample = reader.read()
    assert sample.power_watts == 250.0
    assert sample.temperatures == (("edge", 61.0), ("junction", 79.0), ("memory", 72.0))
    assert ("junction", "emergency", 115.0) in sample.temperature_limits
    assert sample.clocks == (("graphics", 2.495e9), ("memory", 1.124e9))
    assert sample.fan == 0.5
    assert set(sample.throttle_active) == {Throttle.POWER_CAP, Throttle.THERMAL}
    assert sample.energy_joules is None, "before version 1.4 the accumulator's unit is anyone's guess"
    assert sample.ecc_errors == (("uncorrected", "volatile", 0), ("corrected", "volatile", 3))
    reader.close()


def test_mi300x_has_energy_and_no_fan(tmp_path: Path) -> None:
    fake_sysfs.mi300x(tmp_path)
    reader = only(tmp_path)
    sample = reader.read()
    assert sample.power_watts == 612.0
    assert sample.energy_joules == 1000.0
    assert sample.temperatures == (("junction", 67.0), ("memory", 58.0))
    assert sample.temperature == 67.0, "without an edge sensor the hottest stands for the GPU"
    assert sample.fan is None
    assert sample.ecc_errors == (("uncorrected", "volatile", 1), ("corrected", "volatile", 12))
    reader.close()


def test_values_change_live_and_fresh_tells(tmp_path: Path) -> None:
    card = fake_sysfs.navi31(tmp_path)
    reader = only(tmp_path)
    assert reader.read(Detail.POWER).fresh
    assert not reader.read(Detail.POWER).fresh
    card.set({"gpu_metrics": fake_sysfs.gpu_metrics_1_3(firmware_time=2)})
    assert reader.read(Detail.POWER).fresh, "the firmware measured anew, to the same watts"
    card.set({"hwmon/hwmon5/power1_input": 100_000_000, "gpu_busy_percent": 5})
    sample = reader.read()
    assert (sample.power_watts, sample.utilization, sample.fresh) == (100.0, 0.05, True)
    reader.close()


def test_nonsense_is_absent_never_a_number(tmp_path: Path) -> None:
    card = fake_sysfs.navi31(tmp_path)
    card.set(
        {
            "gpu_busy_percent": 65535,
            "hwmon/hwmon5/power1_input": 0,
            "hwmon/hwmon5/temp1_input": 0,
            "gpu_metrics": b"\x10\x00",
        }
    )
    reader = only(tmp_path)
    sample = reader.read()
    assert (sample.utilization, sample.power_watts, sample.throttle) == (None, None, ())
    assert sample.temperatures == (("junction", 79.0), ("memory", 72.0))
    reader.close()


def test_a_sleeping_gpu_is_left_asleep(tmp_path: Path) -> None:
    card = fake_sysfs.navi31(tmp_path)
    reader = only(tmp_path)
    card.set({"power/runtime_status": "suspended"})
    sample = reader.read()
    assert (sample.utilization, sample.power_watts, sample.temperatures) == (None, None, ())
    reader.close()


def test_a_gpu_that_has_gone_is_lost(tmp_path: Path) -> None:
    card = fake_sysfs.navi31(tmp_path)
    reader = only(tmp_path)
    shutil.rmtree(card.device)
    with pytest.raises(GpuLostError, match="kernel log"):
        reader.reopen()


def test_several_cards_in_the_order_of_their_slots(tmp_path: Path) -> None:
    fake_sysfs.mi300x(tmp_path, 1)
    fake_sysfs.polaris(tmp_path, 2)
    fake_sysfs.navi31(tmp_path, 0)
    fake_sysfs.arc_a770(tmp_path, 3)
    infos = [reader.info for reader in open_amd(tmp_path, "n")]
    assert [info.pci_bus_id for info in infos] == ["0000:01:00.0", "0000:03:00.0", "0000:05:00.0"]
    assert [info.ordinal for info in infos] == [0, 1, 2]
