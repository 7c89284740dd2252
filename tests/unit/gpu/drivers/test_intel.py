"""Intel GPUs from fake /sys trees of four generations, with a clock that the test moves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from orchestrator.gpu.drivers.intel import IntelReader, open_intel
from orchestrator.gpu.sample import GpuLostError, Throttle, Vendor
from tests.support import fake_sysfs


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def only(root: Path, clock: Clock) -> IntelReader:
    (found,) = open_intel(root, "node1")
    return IntelReader(found.info, found._card, clock=clock)


def test_iris_xe_has_load_and_clock_only(tmp_path: Path) -> None:
    card, clock = fake_sysfs.iris_xe(tmp_path), Clock()
    reader = only(tmp_path, clock)
    assert reader.info.vendor is Vendor.INTEL
    assert reader.info.memory_total_bytes is None
    assert reader.read().utilization is None, "a rate needs two readings"
    clock.now += 2.0
    card.set_card({"gt/gt0/rc6_residency_ms": 100_500})
    sample = reader.read()
    assert sample.utilization == pytest.approx(0.75)
    assert sample.clocks == (("graphics", 1.25e9),)
    assert (sample.power_watts, sample.memory_used_bytes, sample.temperatures) == (None, None, ())
    reader.close()


def test_arc_a770_gets_power_from_its_energy(tmp_path: Path) -> None:
    card, clock = fake_sysfs.arc_a770(tmp_path), Clock()
    reader = only(tmp_path, clock)
    first = reader.read()
    assert first.energy_joules == 50_000.0
    assert first.power_watts is None
    clock.now += 0.5
    card.set({"hwmon/hwmon2/energy1_input": 50_090_000_000})
    card.set_card({"lmem_avail_bytes": 4 << 30})
    sample = reader.read()
    assert sample.power_watts == pytest.approx(180.0)
    assert sample.utilization == 1.0, "it has not idled at all"
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (12 << 30, 16 << 30)
    assert sample.power_limit_watts == 190.0
    assert sample.temperatures == (("gpu", 58.0),)
    assert sample.fan is None, "revolutions without a maximum are no share of anything"
    assert sample.throttle_active == (Throttle.POWER_CAP,)
    assert (Throttle.THERMAL, False) in sample.throttle
    reader.close()


def test_battlemage_reads_the_card_and_not_the_package(tmp_path: Path) -> None:
    card, clock = fake_sysfs.battlemage(tmp_path), Clock()
    reader = only(tmp_path, clock)
    reader.read()
    clock.now += 1.0
    card.set(
        {
            "hwmon/hwmon4/energy2_input": 130_000_000,
            "tile0/gt0/gtidle/idle_residency_ms": 10_250,
            "tile0/gt1/gtidle/idle_residency_ms": 21_000,
        }
    )
    sample = reader.read()
    assert sample.power_watts == pytest.approx(100.0)
    assert sample.energy_joules == 130.0
    assert sample.utilization == pytest.approx(0.75), "the GT that idled least, not the media one beside it"
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (5 << 30, 12 << 30)
    assert sample.temperatures == (("gpu", 55.0), ("memory", 62.0))
    assert sample.temperature_limits == (("memory", "critical", 105.0),)
    assert sample.power_limit_watts is None, "0 says that the limit is off"
    assert sample.throttle_active == (Throttle.THERMAL,)
    assert sample.clocks == (("graphics", 2.65e9),)
    reader.close()


def test_ponte_vecchio_adds_up_its_tiles(tmp_path: Path) -> None:
    card, clock = fake_sysfs.ponte_vecchio(tmp_path), Clock()
    reader = only(tmp_path, clock)
    reader.read()
    clock.now += 1.0
    card.set({"tile1/gt1/engines/ccs0/busy_ns": 1_600_000_000})
    sample = reader.read()
    assert sample.utilization == pytest.approx(0.6), "the busiest engine"
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (21 << 30, 128 << 30)
    assert sample.power_limit_watts == 600.0
    reader.close()


def test_a_counter_that_starts_anew_gives_no_rate(tmp_path: Path) -> None:
    card, clock = fake_sysfs.arc_a770(tmp_path), Clock()
    reader = only(tmp_path, clock)
    reader.read()
    clock.now += 1.0
    card.set({"hwmon/hwmon2/energy1_input": 1_000})
    card.set_card({"gt/gt0/rc6_residency_ms": 10})
    sample = reader.read()
    assert (sample.power_watts, sample.utilization) == (None, None)
    reader.close()


def test_a_gpu_that_has_gone_is_lost(tmp_path: Path) -> None:
    card, clock = fake_sysfs.arc_a770(tmp_path), Clock()
    reader = only(tmp_path, clock)
    shutil.rmtree(card.device)
    with pytest.raises(GpuLostError, match="kernel log"):
        reader.read()
