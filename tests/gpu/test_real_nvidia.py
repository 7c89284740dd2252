"""A real NVIDIA GPU, where there is one: plausible values, which agree with NVML's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.gpu.drivers.inventory import survey
from orchestrator.gpu.recording.recorder import Recorder, RecordOptions
from orchestrator.gpu.sample import Detail, GpuReader, Vendor

pytestmark = pytest.mark.gpu


@pytest.fixture
def readers() -> tuple[GpuReader, ...]:
    found = survey()
    nvidia = tuple(reader for reader in found.readers if reader.info.vendor is Vendor.NVIDIA)
    if not nvidia:
        pytest.skip("no NVIDIA GPU here")
    return nvidia


def test_a_sample_makes_sense_and_agrees_with_nvml(readers: tuple[GpuReader, ...]) -> None:
    import pynvml

    pynvml.nvmlInit()
    for reader in readers:
        if reader.info.parent_uuid is not None:
            continue
        sample = reader.read()
        handle = pynvml.nvmlDeviceGetHandleByUUID(reader.info.uuid)
        assert reader.info.model == pynvml.nvmlDeviceGetName(handle)
        assert sample.memory_total_bytes == pynvml.nvmlDeviceGetMemoryInfo(handle).total
        assert sample.power_watts is not None
        assert 1.0 < sample.power_watts < 2000.0
        assert sample.temperature is not None
        assert 10.0 < sample.temperature < 110.0
        assert sample.utilization is None or 0.0 <= sample.utilization <= 1.0
        reader.close()
    pynvml.nvmlShutdown()


def test_energy_grows_as_power_says(readers: tuple[GpuReader, ...]) -> None:
    reader = readers[0]
    first = second = reader.read()
    if first.energy_joules is None or first.power_watts is None:
        pytest.skip("this GPU counts no energy")
    while second.energy_joules is not None and second.energy_joules < first.energy_joules + 2 * first.power_watts:
        time.sleep(0.05)
        second = reader.read()
    assert second.energy_joules is not None
    watts = (second.energy_joules - first.energy_joules) / (second.monotonic - first.monotonic)
    assert watts == pytest.approx(first.power_watts, rel=0.5)
    reader.close()


def test_a_reading_of_each_detail_has_power_and_its_cost_is_told(
    readers: tuple[GpuReader, ...], record_property: Callable[[str, object], None]
) -> None:
    reader = readers[0]
    reader.read()
    for detail in Detail:
        started = time.perf_counter()
        for _ in range(20):
            assert reader.read(detail).power_watts is not None
        spent = (time.perf_counter() - started) / 20
        record_property(f"{detail.name.lower()}_seconds", spent)
    reader.close()


def test_a_recording_at_a_hundred_hertz_has_every_tick_or_counts_it_as_missed(
    readers: tuple[GpuReader, ...], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with Recorder(readers, RecordOptions(directory=tmp_path, rate=100.0, csv=True)) as recorder:
        while recorder.stats.as_dict()["gpus"][0]["samples"] < 300:
            time.sleep(0.05)
    found = recorder.stats.as_dict()
    record_property("achieved_rate_hz", min(gpu["achieved_rate_hz"] for gpu in found["gpus"]))
    ticks = [gpu.seconds * 100.0 + 1.0 for gpu in recorder.stats.gpus.values()]
    taken = sum(gpu["samples"] for gpu in found["gpus"])
    assert taken + found["missed_ticks"] == pytest.approx(sum(ticks), abs=2 * len(ticks))
    assert found["gpus"][0]["distinct_value_rate_hz"] > 1.0
