"""NVIDIA GPUs as the reader sees them, through unmodified pynvml and the fake driver library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest

from orchestrator.gpu.drivers.nvidia import (
    AGAIN_SECONDS,
    ENERGY_SECONDS,
    LONGEST_AGAIN_SECONDS,
    PCIE_TRANSMIT,
    SETTINGS_SECONDS,
    SLOW_SECONDS,
    NvmlReader,
    open_nvidia,
)
from orchestrator.gpu.sample import Detail, GpuLostError, GpuProcess, GpuReadError, Throttle
from tests.support import fake_nvml
from tests.support.fake_nvml import ULL, FakeNvml, layout
from tests.unit.gpu.support import wait_for


def first_reader() -> NvmlReader:
    return open_nvidia()[0]


def test_discovery_names_every_gpu(nvml: FakeNvml) -> None:
    infos = [reader.info for reader in open_nvidia()]
    assert [info.uuid for info in infos] == [nvml.uuid(0), nvml.uuid(1)]
    assert [info.index for info in infos] == [0, 1]
    assert infos[1].model == "NVIDIA H100 80GB HBM3"
    assert infos[1].pci_bus_id == "0000:11:00.0"
    assert infos[1].memory_total_bytes == 80 << 30
    assert infos[1].driver_version == "580.65.06"
    assert all(info.placeable for info in infos)


def test_full_sample_in_base_units(nvml: FakeNvml) -> None:
    nvml[0].raw.fields[0].value = 0
    nvml[0].field(74, 2_500_000_000)
    nvml[0].field(4, 3)
    nvml[0].field(143, 1, kind=fake_nvml.UINT)
    nvml[0].reasons = 0x4 | 0x40
    nvml[0].fan = 40
    sample = first_reader().read()
    assert sample.gpu_uuid == nvml.uuid(0)
    assert sample.utilization == 0.5
    assert sample.memory_activity == 0.1
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (10 << 30, 80 << 30), "without the reservation"
    assert (sample.power_watts, sample.power_limit_watts) == (300.0, 700.0)
    assert sample.energy_joules is not None
    assert 1000.0 <= sample.energy_joules < 1000.0 + 300.0 * 60
    assert sample.temperatures == (("gpu", 55.0), ("memory", 62.0))
    assert ("gpu", "slowdown", 89.0) in sample.temperature_limits
    assert dict(sample.clocks)["memory"] == 2.619e9
    assert sample.fan == 0.4
    assert (sample.pcie_transmit_bytes, sample.pcie_receive_bytes) == (5 << 30, 7 << 30)
    assert sample.nvlinks == ((0, 1024000, 1024000), (1, 2048000, 2048000))
    assert set(sample.throttle_active) == {Throttle.POWER_CAP, Throttle.HARDWARE_THERMAL}
    assert dict(sample.throttle_seconds)[Throttle.POWER_CAP] == 2.5
    assert ("uncorrected", "volatile", 3) in sample.ecc_errors
    assert ("uncorrectable", 1) in sample.remapped_rows


def test_what_is_set_is_asked_for_now_and_then_and_repeated_meanwhile(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml[0].fan = 40
    reader = first_reader()
    assert (reader.read().power_limit_watts, reader.read().fan) == (700.0, 0.4)
    asked = nvml[0].count("limit"), nvml[0].count("fan")
    nvml[0].limit_mw, nvml[0].fan = 500_000, 60
    assert (reader.read().power_limit_watts, reader.read().fan) == (700.0, 0.4)
    assert (nvml[0].count("limit"), nvml[0].count("fan")) == asked
    later = time.monotonic() + SETTINGS_SECONDS
    monkeypatch.setattr("time.monotonic", lambda: later)
    sample = reader.read()
    assert (sample.power_limit_watts, sample.fan) == (500.0, 0.6)


def test_detail_decides_which_calls_are_made(nvml: FakeNvml) -> None:
    reader = first_reader()
    reader.read()
    before = {call: nvml[0].count(call) for call in layout.CALLS}
    reader.read(Detail.POWER)
    made = {call for call in layout.CALLS if nvml[0].count(call) > before[call]}
    assert made == {"fields"}, "a fast reading makes one driver call"
    assert nvml[0].count("fields") == before["fields"] + 1
    assert reader.read(Detail.LOAD).temperature == 55.0
    assert nvml[0].count("temperature") == before["temperature"] + 1
    assert nvml[0].count("utilization") == before["utilization"] + 1
    assert nvml[0].count("limit") == before["limit"]
    reader.read()
    assert nvml[0].count("fields") == before["fields"] + 5, (
        "a full reading has a batch with power, one that is slow, and the energy"
    )


def test_a_sparing_reader_repeats_what_is_slow_to_read(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml[0].field(PCIE_TRANSMIT, 1_000, kind=ULL)
    reader = first_reader()
    reader.options.sparing = True
    first = reader.read()
    assert first.energy_joules is not None
    nvml[0].energy_mj += 1_000_000
    nvml[0].temperature = 71
    nvml[0].field(PCIE_TRANSMIT, 2_000, kind=ULL)
    again = reader.read()
    assert (again.energy_joules, again.pcie_transmit_bytes) == (first.energy_joules, 1_000)
    assert again.temperature == 71.0
    later = time.monotonic() + ENERGY_SECONDS
    monkeypatch.setattr("time.monotonic", lambda: later)
    then = reader.read()
    assert then.energy_joules is not None
    assert then.energy_joules >= first.energy_joules + 1_000.0
    assert then.pcie_transmit_bytes == 1_000
    latest = later + SLOW_SECONDS
    monkeypatch.setattr("time.monotonic", lambda: latest)
    assert reader.read().pcie_transmit_bytes == 2_000


def test_a_reader_that_is_not_sparing_reads_all_each_time(nvml: FakeNvml) -> None:
    nvml[0].field(PCIE_TRANSMIT, 1_000, kind=ULL)
    reader = first_reader()
    assert reader.read().pcie_transmit_bytes == 1_000
    nvml[0].field(PCIE_TRANSMIT, 2_000, kind=ULL)
    assert reader.read().pcie_transmit_bytes == 2_000


def test_values_change_live(nvml: FakeNvml) -> None:
    reader = first_reader()
    reader.read()
    nvml[0].power_mw, nvml[0].temperature, nvml[0].utilization = 123_456, 71, 99
    sample = reader.read()
    assert (sample.power_watts, sample.temperature, sample.utilization) == (123.456, 71.0, 0.99)


def test_zero_power_is_absent(nvml: FakeNvml) -> None:
    reader = first_reader()
    reader.read()
    nvml[0].power_mw = 0
    assert reader.read().power_watts is None


def test_blank_sentinels_are_absent_never_numbers(nvml: FakeNvml) -> None:
    reader = first_reader()
    reader.read()
    nvml[0].utilization = 2**32 - 1
    nvml[0].temperature = 2**31 - 1
    nvml[0].field(83, 0x7FFFFFFFFFFFFFF0)
    nvml[0].field(197, 2**64 - 1)
    nvml[0].field(82, 0x7FFFFFF0, kind=fake_nvml.UINT)
    sample = reader.read()
    assert sample.utilization is None
    assert sample.temperatures == ()
    assert sample.energy_joules is None
    assert sample.pcie_transmit_bytes is None


def test_what_a_gpu_lacks_is_absent_and_not_asked_again(nvml: FakeNvml) -> None:
    for number in (82, 83, 197, 198, 91, 142, 143, 144, 145):
        nvml[0].drop_field(number)
    nvml[0].fail("energy", fake_nvml.NOT_SUPPORTED)
    reader = first_reader()
    sample = reader.read()
    assert sample.energy_joules is None
    assert sample.fan is None
    assert sample.temperatures == (("gpu", 55.0),)
    assert (sample.pcie_transmit_bytes, sample.nvlinks, sample.remapped_rows) == (None, (), ())
    asked = nvml[0].count("fan")
    reader.read()
    assert nvml[0].count("fan") == asked


def test_what_worked_once_is_asked_again_after_a_failure(nvml: FakeNvml) -> None:
    reader = first_reader()
    reader.read()
    nvml[0].field(186, kind=fake_nvml.UINT, result=fake_nvml.NOT_SUPPORTED)
    assert reader.read().power_watts is None, "drivers say so now and then when polled fast"
    nvml[0].field(186, kind=fake_nvml.UINT, result=0)
    assert reader.read().power_watts == 300.0


@pytest.mark.parametrize("result", [fake_nvml.UNKNOWN, fake_nvml.TIMEOUT])
def test_a_call_that_fails_at_opening_for_a_passing_reason_is_tried_again(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, result: int
) -> None:
    passing = ("utilization", "temperature", "limit", *(("fields",) if result == fake_nvml.TIMEOUT else ()))
    nvml[0].field(82, 62, kind=fake_nvml.UINT, result=result)
    for call in passing:
        nvml[0].fail(call, result)
    reader = first_reader()
    assert (reader.read().utilization, reader.read().temperatures) == (None, ())
    for call in passing:
        nvml[0].fail(call, 0)
    nvml[0].field(82, 62, kind=fake_nvml.UINT, result=0)
    later = time.monotonic() + AGAIN_SECONDS
    monkeypatch.setattr("time.monotonic", lambda: later)
    sample = reader.read()
    assert (sample.utilization, sample.power_watts, sample.power_limit_watts) == (0.5, 300.0, 700.0)
    assert sample.temperatures == (("gpu", 55.0), ("memory", 62.0))
    asked = nvml[0].count("fan")
    later += LONGEST_AGAIN_SECONDS + SETTINGS_SECONDS
    assert reader.read().fan is None
    assert nvml[0].count("fan") == asked, "nothing is in doubt any more"


def test_discovery_repeats_a_call_that_fails_once(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [pynvml.NVMLError(fake_nvml.UNKNOWN), pynvml.NVMLError(fake_nvml.TIMEOUT)]
    name = pynvml.nvmlDeviceGetUUID

    def flaky(handle: object) -> str:
        if answers:
            raise answers.pop()
        return str(name(handle))

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", flaky)
    assert [reader.info.uuid for reader in open_nvidia()] == [nvml.uuid(0), nvml.uuid(1)]


def test_power_comes_from_the_module_where_the_gpu_scope_is_refused(nvml: FakeNvml) -> None:
    nvml[0].drop_field(186)
    nvml[0].field(186, 512_000, scope=1, kind=fake_nvml.UINT)
    assert first_reader().read().power_watts == 512.0


def test_power_falls_back_to_the_average(nvml: FakeNvml) -> None:
    nvml[0].drop_field(186)
    reader = first_reader()
    assert reader.read().power_watts == 300.0
    assert nvml[0].count("power") > 0


def test_fresh_follows_the_sensors_own_time(nvml: FakeNvml) -> None:
    old = (time.time_ns() // 1000) - 50_000
    nvml[0].field(186, 300_000, kind=fake_nvml.UINT, timestamp_us=old)
    reader = first_reader()
    assert reader.read().fresh, "the first value is news"
    assert not reader.read().fresh, "same sensor time: the same value handed out again"
    nvml[0].field(186, 300_000, kind=fake_nvml.UINT, timestamp_us=old + 20_000)
    again = reader.read()
    assert again.fresh, "the same number, measured anew"
    assert again.driver_timestamp == pytest.approx((old + 20_000) / 1e6)


def test_fresh_needs_a_new_value_where_the_time_is_only_that_of_the_call(nvml: FakeNvml) -> None:
    reader = first_reader()
    assert reader.read().fresh
    assert not reader.read().fresh
    nvml[0].power_mw = 301_000
    assert reader.read().fresh


def test_a_32_bit_pcie_counter_is_carried_over_its_wrap(nvml: FakeNvml) -> None:
    nvml[0].field(197, 2**32 - 1000)
    reader = first_reader()
    assert reader.read().pcie_transmit_bytes == 2**32 - 1000
    nvml[0].field(197, 500)
    assert reader.read().pcie_transmit_bytes == 2**32 + 500
    nvml[0].field(197, 100)
    assert reader.read().pcie_transmit_bytes == 100, "falling back a little is a reset, not a wrap"


def test_a_lost_gpu_raises_and_comes_back_with_reopen(nvml: FakeNvml) -> None:
    first, second = open_nvidia()
    first.read()
    nvml[0].error = fake_nvml.GPU_IS_LOST
    with pytest.raises(GpuLostError, match="Xid 79"):
        first.read()
    with pytest.raises(GpuLostError):
        first.reopen()
    assert second.read().power_watts == 300.0, "the other GPU is not touched"
    nvml[0].error = 0
    first.reopen()
    assert first.read().power_watts == 300.0


def test_a_gpu_that_answers_nothing_raises(nvml: FakeNvml) -> None:
    reader = first_reader()
    reader.read()
    nvml[0].error = fake_nvml.UNKNOWN
    with pytest.raises(GpuReadError, match="nvidia-smi"):
        reader.read()


def test_mig_devices_are_listed_after_their_gpu(nvml: FakeNvml) -> None:
    nvml[0].mig(
        [
            ("MIG-1", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 << 30, 1 << 30),
            ("MIG-2", "NVIDIA H100 80GB HBM3 MIG 2g.20gb", 20 << 30, 3 << 30),
        ]
    )
    readers = open_nvidia()
    assert [reader.info.uuid for reader in readers] == [nvml.uuid(0), "MIG-1", "MIG-2", nvml.uuid(1)]
    assert [reader.info.placeable for reader in readers] == [False, True, True, True]
    assert readers[2].info.parent_uuid == nvml.uuid(0)
    assert readers[2].info.pci_bus_id == readers[0].info.pci_bus_id
    device = readers[2].read()
    assert (device.memory_used_bytes, device.memory_total_bytes) == (3 << 30, 20 << 30)
    assert (device.utilization, device.power_watts, device.temperatures) == (None, None, ())
    assert readers[0].read().power_watts == 300.0, "what they share stays with the GPU"


def test_processes_only_when_asked_for(nvml: FakeNvml) -> None:
    nvml[0].processes({4711: 5 << 30, 4712: 2**64 - 1})
    reader = first_reader()
    assert reader.read().processes == ()
    reader.options.processes = True
    assert reader.read().processes == (
        GpuProcess(pid=4711, memory_bytes=5 << 30),
        GpuProcess(pid=4712, memory_bytes=None),
    )


def test_xid_events_are_counted_by_code(nvml: FakeNvml) -> None:
    reader = first_reader()
    reader.options.xids = True
    try:
        assert reader.read().xids == ()
        assert reader._xids is not None
        assert reader._xids.wait_until_armed(10.0)
        before = time.time()
        for code in (79, 13, 79):
            nvml[0].xid(code)
        wait_for(lambda: sum(xid.count for xid in reader.read().xids) == 3, "the third event")
        counts = reader.read().xids
        assert [(xid.code, xid.count) for xid in counts] == [(13, 1), (79, 2)]
        assert all(before - 1 <= xid.last_timestamp <= time.time() for xid in counts)
    finally:
        reader.close()


def test_a_driver_that_does_not_start_is_an_error_with_a_remedy(nvml: FakeNvml) -> None:
    nvml.state.init_result = 18  # the library and the kernel module are of different versions
    with pytest.raises(GpuReadError, match="nvidia-smi"):
        open_nvidia()


def test_a_host_without_the_driver_has_no_nvidia_gpu(nvml: FakeNvml) -> None:
    nvml.state.init_result = 9
    assert open_nvidia() == []


def test_a_gpu_that_fell_off_the_bus_does_not_hide_the_others(nvml: FakeNvml) -> None:
    nvml[0].error = fake_nvml.GPU_IS_LOST
    assert [reader.info.uuid for reader in open_nvidia()] == [nvml.uuid(1)]


OLD_DRIVER = (
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetSupportedClocksEventReasons",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetMigMode",
    "nvmlEventSetCreate",
)
ONE_SAMPLE = """
import dataclasses, json
from orchestrator.gpu.drivers.nvidia import open_nvidia
reader = open_nvidia()[0]
reader.options.xids = True
sample = dataclasses.asdict(reader.read())
reader.close()
print(json.dumps(sample))
"""


def run_with(fake: FakeNvml, *, without: tuple[str, ...] = ()) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", ONE_SAMPLE],
        env={**os.environ, **fake.environment(without=without)},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_an_old_driver_lacks_calls_and_still_gives_what_it_has(tmp_path: Path) -> None:
    fake = FakeNvml.create(tmp_path, gpus=1)
    fake[0].reasons = 0x4
    sample = run_with(fake, without=OLD_DRIVER)
    assert sample["power_watts"] == 300.0
    assert sample["memory_used_bytes"] == (10 << 30) + (600 << 20), "the old call counts the reservation as used"
    assert sample["temperatures"] == [["gpu", 55.0]]
    assert sample["power_limit_watts"] == 700.0
    assert isinstance(sample["energy_joules"], float)
    assert ["power_cap", True] in sample["throttle"]  # type: ignore[operator]  # JSON
    assert (sample["ecc_errors"], sample["nvlinks"], sample["pcie_transmit_bytes"]) == ([], [], None)
