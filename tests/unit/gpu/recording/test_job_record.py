"""A job's telemetry: appended while it runs, read back afterwards, whole after a crash."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from orchestrator.gpu.recording.job_record import COLUMNS, JobRecorder, read_job_telemetry
from orchestrator.gpu.sample import Detail, Throttle
from orchestrator.gpu.sampler import Reading
from tests.unit.gpu.support import gpu_info, sample


def reading(at: float, uuid: str = "GPU-a", detail: Detail = Detail.FULL, **values: object) -> Reading:
    return Reading(tick=0, lateness=0.0, detail=detail, sample=sample(uuid, at, **values))


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    recorder = JobRecorder(tmp_path, gpu_info("GPU-a", 1))
    recorder.append(
        reading(
            100.0,
            utilization=0.5,
            memory_used_bytes=10,
            power_watts=300.25,
            energy_joules=12.5,
            temperatures=(("gpu", 55.0),),
            clocks=(("sm", 1.98e9),),
            throttle=((Throttle.THERMAL, True), (Throttle.POWER_CAP, True)),
        )
    )
    recorder.append(reading(101.0))
    recorder.close()
    first, second = read_job_telemetry(tmp_path).samples
    assert first.timestamp == pytest.approx(1.7e9 + 100.0)
    assert (first.gpu_index, first.gpu_name, first.gpu_uuid, first.vendor) == (1, "NVIDIA H100", "GPU-a", "nvidia")
    assert (first.utilization, first.memory_used_bytes, first.memory_total_bytes) == (0.5, 10, 80 << 30)
    assert (first.power_watts, first.energy_joules, first.temperature_celsius) == (300.25, 12.5, 55.0)
    assert first.clocks == (("sm", 1.98e9),)
    assert first.throttle == ("thermal", "power_cap")
    assert second.elapsed_seconds == pytest.approx(1.0)
    assert (second.utilization, second.power_watts, second.throttle) == (None, None, ())


def test_gpus_are_merged_in_the_order_of_time(tmp_path: Path) -> None:
    recorders = {uuid: JobRecorder(tmp_path, gpu_info(uuid, index)) for index, uuid in enumerate(("GPU-a", "GPU-b"))}
    for at in (3.0, 4.0):
        for offset, (uuid, recorder) in enumerate(recorders.items()):
            recorder.append(reading(at + offset / 10, uuid))
    for recorder in recorders.values():
        recorder.close()
    recording = read_job_telemetry(tmp_path)
    assert [one.gpu_index for one in recording.samples] == [0, 1, 0, 1]
    assert sorted(recording.by_gpu) == [0, 1]
    assert recording.duration_seconds == pytest.approx(1.1)


def test_a_row_that_a_crash_cut_off_is_left_out_and_the_next_one_is_whole(tmp_path: Path) -> None:
    recorder = JobRecorder(tmp_path, gpu_info())
    recorder.append(reading(1.0, power_watts=1.0))
    recorder.close()
    (path,) = tmp_path.glob("*.csv")
    with path.open("a", encoding="utf-8") as file:
        file.write("1700000002.000,0.5,10")
    again = JobRecorder(tmp_path, gpu_info())
    again.append(reading(3.0, power_watts=3.0))
    again.close()
    recording = read_job_telemetry(tmp_path)
    assert [one.power_watts for one in recording.samples] == [1.0, 3.0]
    assert recording.dropped == 1


def test_rows_reach_the_disk_while_the_job_runs(tmp_path: Path) -> None:
    recorder = JobRecorder(tmp_path, gpu_info())
    recorder.append(reading(1.0, power_watts=1.0))
    assert len(read_job_telemetry(tmp_path).samples) == 1
    recorder.close()


def test_a_slower_job_takes_fewer_samples_than_the_gpu_gives(tmp_path: Path) -> None:
    recorder = JobRecorder(tmp_path, gpu_info(), rate=1.0)
    for tenth in range(100):
        recorder.append(reading(tenth / 10))
    recorder.close()
    times = [one.elapsed_seconds for one in read_job_telemetry(tmp_path).samples]
    gaps = [round(later - earlier, 3) for earlier, later in itertools.pairwise(times)]
    assert len(times) in {10, 11}
    assert all(0.7 <= gap <= 1.0 for gap in gaps)
    assert gaps.count(1.0) >= 8


def test_a_fast_job_takes_them_all_whatever_their_detail(tmp_path: Path) -> None:
    recorder = JobRecorder(tmp_path, gpu_info(), rate=100.0)
    for tick in range(100):
        recorder.append(reading(tick / 100 + 0.0003 * (tick % 3), detail=Detail.POWER, power_watts=float(tick)))
    recorder.close()
    assert [one.power_watts for one in read_job_telemetry(tmp_path).samples] == [float(tick) for tick in range(100)]


def test_a_file_that_grows_too_long_is_written_to_less_often(tmp_path: Path) -> None:
    recorder = JobRecorder(tmp_path, gpu_info(), thin_out_bytes=2000)
    for second in range(400):
        recorder.append(reading(float(second), power_watts=float(second)))
    recorder.close()
    seconds = [int(one.power_watts or 0) for one in read_job_telemetry(tmp_path).samples]
    gaps = [later - earlier for earlier, later in itertools.pairwise(seconds)]
    assert gaps == sorted(gaps), "ever fewer, evenly"
    assert {1, 2, 4} <= set(gaps)
    (path,) = tmp_path.glob("*.csv")
    assert path.stat().st_size < 9000


def test_a_full_disk_loses_rows_and_not_the_caller(tmp_path: Path) -> None:
    recorder = JobRecorder(tmp_path, gpu_info())
    os.dup2(os.open("/dev/full", os.O_WRONLY), recorder._file)
    recorder.append(reading(1.0))
    recorder.append(reading(2.0))
    assert recorder.lost_rows == 2
    recorder.close()


def test_nothing_recorded_is_an_empty_recording(tmp_path: Path) -> None:
    recording = read_job_telemetry(tmp_path)
    assert (recording.samples, recording.duration_seconds) == ((), 0.0)


def test_the_header_names_the_columns_and_a_uuid_cannot_leave_the_directory(tmp_path: Path) -> None:
    recorder = JobRecorder(tmp_path, gpu_info("../../MIG/a b"))
    recorder.close()
    recorder.append(reading(1.0))  # after close: ignored
    (path,) = tmp_path.glob("*.csv")
    assert path.read_text(encoding="utf-8") == ",".join(COLUMNS) + "\n"
