"""Recordings: the formats of their sources, rates, GPUs that hang, and the statistics at the end."""

from __future__ import annotations

import csv
import datetime as dt
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.gpu.drivers.nvidia import open_nvidia
from orchestrator.gpu.recording.reading import read_recording
from orchestrator.gpu.recording.recorder import (
    GpuStats,
    Recorder,
    RecordOptions,
    TrainingFile,
    _single_formatter,
)
from orchestrator.gpu.recording.rows import COLUMNS, View, csv_header, csv_row, multi_entry, single_entry
from orchestrator.gpu.sample import Detail, Sample, Throttle
from orchestrator.gpu.sampler import Reading
from tests.support import fake_nvml
from tests.support.fake_nvml import FakeNvml
from tests.unit.gpu.support import ScriptedReader, gpu_info, sample, wait_for

MakeReader = Callable[[str], ScriptedReader]
STARTED = dt.datetime.fromisoformat("2026-01-15T10:30:00")
AT = STARTED.timestamp()


def full(uuid: str = "GPU-a", **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "utilization": 0.85,
        "memory_used_bytes": 12800 << 20,
        "memory_total_bytes": 24576 << 20,
        "power_watts": 150.25,
        "power_limit_watts": 300.0,
        "energy_joules": 1000.0,
        "fan": 0.4,
        "temperatures": (("gpu", 55.0), ("memory", 62.0)),
        "temperature_limits": (("gpu", "slowdown", 89.0), ("gpu", "shutdown", 92.0)),
        "clocks": (("sm", 1.98e9), ("memory", 2.619e9)),
        "throttle": ((Throttle.POWER_CAP, True),),
    }
    return sample(uuid, **{**values, **changes})


def view_of(value: Sample | None, index: int = 0, **info: Any) -> View:
    view = View(gpu_info(f"GPU-{index}", index, model="NVIDIA A10G", **info))
    if value is not None:
        view.update(Reading(tick=0, lateness=0.0, detail=Detail.FULL, sample=value))
    return view


def test_the_single_gpu_entry_has_the_sources_keys_and_units() -> None:
    entry = single_entry(AT, 10.5, view_of(full()), {"epoch": 1, "batch": 100, "phase": "training"})
    assert entry == {
        "timestamp": "2026-01-15T10:30:00.000",
        "gpu_index": 0,
        "gpu_name": "NVIDIA A10G",
        "gpu_type": "NVIDIA",
        "gpu_uuid": "GPU-0",
        "utilization": 85.0,
        "memory_used": 12800.0,
        "memory_total": 24576.0,
        "memory_percent": 52.1,
        "temperature": 55.0,
        "temperatures": {"GPU": 55.0, "Memory": 62.0},
        "temp_limits": {"GPU": {"slowdown": 89.0, "shutdown": 92.0}},
        "power": 150.25,
        "power_limit": 300.0,
        "fan_speed": 40,
        "clocks": {"gpu": 1980, "sm": 1980, "memory": 2619},
        "clock_states": {},
        "performance_level": "unknown",
        "energy_joules": 1000.0,
        "throttle": ["power_cap"],
        "fresh": True,
        "elapsed_seconds": 10.5,
        "training_metadata": {"epoch": 1, "batch": 100, "phase": "training"},
    }


def test_the_multi_gpu_entry_adds_up_the_very_same_samples() -> None:
    views = [view_of(full(), 0), view_of(full(utilization=0.8, power_watts=100.0, temperatures=(("gpu", 78.0),)), 1)]
    entry = multi_entry(AT, 0.0, views, {})
    assert [gpu["gpu_index"] for gpu in entry["multi_gpu_data"]] == [0, 1]
    assert entry["aggregate_stats"] == {
        "total_memory_used": 25600.0,
        "total_memory_total": 49152.0,
        "total_memory_percent": 52.1,
        "average_utilization": 82.5,
        "total_power": 250.25,
        "total_power_limit": 600.0,
        "max_temperature": 78.0,
        "gpu_count": 2,
    }
    assert "training_metadata" not in entry


GPUTOP_NUMBERS = ("utilization", "memory_used", "memory_total", "memory_percent", "power", "power_limit", "fan_speed")
"""Keys that gputop's --gen-graph and --compare look up in each row without checking that they exist, and compare with 0.

As of its commit 3bb2c275: `utilization`, `memory_percent`, `power` and `fan_speed` of each row, `timestamp` in one of two forms, of the
first row `gpu_name`, `power_limit`, and `critical` and `emergency` of `temp_limits`. They add up temperatures and clocks.
"""
GPUTOP_TIME = "%Y-%m-%dT%H:%M:%S.%f"


def test_every_row_has_what_gputops_readers_look_up() -> None:
    no_fan = full(fan=None, utilization=None)
    for value in (full(), no_fan, sample()):
        entry = single_entry(AT, 0.0, view_of(value), {})
        assert all(isinstance(entry[key], int | float) for key in GPUTOP_NUMBERS)
        assert all(isinstance(entry[key], dict) for key in ("temperatures", "temp_limits", "clocks", "clock_states"))
        assert all(isinstance(entry[key], str) for key in ("timestamp", "gpu_name", "gpu_type", "performance_level"))
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}", entry["timestamp"])
        assert dt.datetime.strptime(entry["timestamp"], GPUTOP_TIME)  # noqa: DTZ007 - the files have no zone
        told = [*entry["temperatures"].values(), *entry["clocks"].values()]
        told += [celsius for limits in entry["temp_limits"].values() for celsius in limits.values()]
        assert all(isinstance(number, int | float) for number in told)
        many = multi_entry(AT, 0.0, [view_of(value), view_of(full(), 1)], {})
        assert set(GPUTOP_NUMBERS) - {"fan_speed"} <= many["multi_gpu_data"][0].keys()


def test_what_a_gpu_does_not_say_is_listed_as_absent(tmp_path: Path) -> None:
    single = single_entry(AT, 0.0, view_of(sample()), {})
    assert single["absent"] == [
        "utilization",
        "memory_used",
        "memory_total",
        "memory_percent",
        "power",
        "power_limit",
        "fan_speed",
    ]
    entry = multi_entry(AT, 0.0, [view_of(sample(), 0), view_of(None, 1)], {})
    assert [gpu["gpu_index"] for gpu in entry["multi_gpu_data"]] == [0]
    assert entry["aggregate_stats"]["gpu_count"] == 1
    assert "average_utilization" in entry["aggregate_stats"]["absent"]
    path = tmp_path / "stats.json"
    path.write_text(json.dumps([single, single_entry(AT + 1, 1.0, view_of(full(utilization=0.0, fan=None)), {})]))
    silent, idle = read_recording(path).samples
    assert (silent.utilization, silent.memory_used_bytes, silent.fan, silent.power_watts) == (None, None, None, None)
    assert (idle.utilization, idle.memory_used_bytes, idle.fan) == (0.0, 12800 << 20, None)


def test_the_first_row_is_a_whole_one() -> None:
    """The first reading of a GPU has no rate: the recording begins with the second one."""
    formatter = _single_formatter(0)
    view = view_of(full(utilization=None))
    assert formatter(AT, 0.0, [view], {}) is None
    assert formatter(AT, 0.1, [view_of(full())], {}) is not None
    assert formatter(AT, 0.2, [view], {}) is not None, "a later row that lacks a rate is kept"
    assert _single_formatter(0)(AT, 2.0, [view], {}) is not None, "a GPU that never tells it is recorded all the same"


def test_the_single_file_holds_the_gpu_that_was_chosen_under_the_name_that_was_given(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    chosen = options(tmp_path, rate=50.0, gpu=1, stats_file="gpu_monitoring.json")
    with Recorder(open_nvidia(), chosen) as running:
        wait_for(lambda: running.stats.lateness.count > 8, "a few readings")
    assert {path.name for path in running.paths} == {"gpu_monitoring.json", "gpu_monitoring_multi_gpu.json"}
    assert {entry["gpu_index"] for entry in json.loads((tmp_path / "gpu_monitoring.json").read_bytes())} == {1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu": 7}, "there is no GPU 7 to record; there are: 0."),
        ({"stats_file": "../x.json"}, "cannot be used"),
        ({"stats_file": "x.csv"}, "'x.csv' cannot be used"),
        ({"stats_file": "a" * 300 + ".json"}, "cannot be used"),
        ({"gpu": 0, "csv": True}, "a CSV file has every GPU"),
    ],
)
def test_a_choice_that_cannot_be_recorded_is_named(
    make_reader: MakeReader, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Recorder([make_reader("GPU-a")], options(tmp_path, **changes))


def test_values_read_less_often_are_repeated_for_a_while_only() -> None:
    view = view_of(full(at=100.0))
    view.update(Reading(tick=1, lateness=0.0, detail=Detail.POWER, sample=sample(at=101.0, power_watts=99.0)))
    entry = single_entry(AT, 0.0, view, {})
    assert (entry["power"], entry["utilization"], entry["temperature"]) == (99.0, 85.0, 55.0)
    view.update(Reading(tick=2, lateness=0.0, detail=Detail.POWER, sample=sample(at=102.5, power_watts=98.0)))
    entry = single_entry(AT, 0.0, view, {})
    assert entry["power"] == 98.0
    assert "utilization" in entry["absent"]
    assert entry["temperatures"] == {}
    assert "temperature" not in entry


def test_csv_rows_for_every_column() -> None:
    columns = tuple(COLUMNS)
    header = csv_header([gpu_info("a", 0), gpu_info("b", 3)], columns)
    assert header.startswith("timestamp,elapsed_sec,gpu0_power_w,gpu0_temp_c,")
    assert "gpu3_fresh" in header
    cells = [COLUMNS[name] for name in columns]
    row = csv_row(AT + 0.0125, 0.01, [view_of(full(), 0), view_of(None, 3)], cells)
    assert row == (
        "2026-01-15T10:30:00.012,0.010,150.250,55,85,12800,1980,1000.000,300.0,40,power_cap,1" + "," * len(columns)
    )


def options(directory: Path, **changes: Any) -> RecordOptions:
    return RecordOptions(**{"directory": directory, "started": STARTED, "name": "lenet5", **changes})


def test_a_csv_recording(nvml: FakeNvml, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Recorder(open_nvidia(), options(out, rate=100.0, csv=True)) as running:
        wait_for(lambda: running.stats.lateness.count > 60, "sixty readings")
    (path,) = out.iterdir()
    assert path.name == "gpu_metrics_20260115_103000.csv"
    lines = list(csv.reader(path.read_text().splitlines()))
    assert lines[0] == ["timestamp", "elapsed_sec", "gpu0_power_w", "gpu0_temp_c", "gpu1_power_w", "gpu1_temp_c"]
    assert lines[1][2:] == ["300.000", "55", "300.000", "55"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}", lines[1][0])
    elapsed = [float(line[1]) for line in lines[1:]]
    assert elapsed == sorted(set(elapsed)), "one row a tick, in order"
    ticks = [round(seconds * 100) for seconds in elapsed]
    assert elapsed == [tick / 100 for tick in ticks], "the times of the ticks, not of the readings"


def test_a_json_recording_is_valid_at_every_moment(nvml: FakeNvml, tmp_path: Path) -> None:
    out = tmp_path / "out"
    single, multi = (
        out / "gpu_stats_lenet5_20260115_103000.json",
        out / "gpu_stats_lenet5_20260115_103000_multi_gpu.json",
    )
    with Recorder(open_nvidia(), options(out, rate=100.0, flush_seconds=0.2)) as running:
        assert running.paths == (single, multi)
        wait_for(lambda: json.loads(single.read_bytes()) and json.loads(multi.read_bytes()), "the first entries")
        size = multi.stat().st_size
        while multi.stat().st_size < 4 * size:
            json.loads(single.read_bytes())
            json.loads(multi.read_bytes())
    assert sorted(out.iterdir()) == [single, multi]
    entries = json.loads(multi.read_bytes())
    assert entries[0]["aggregate_stats"]["gpu_count"] == 2
    assert entries[0]["aggregate_stats"]["total_power"] == 600.0
    assert json.loads(single.read_bytes())[0]["gpu_name"] == "NVIDIA H100 80GB HBM3"


def test_a_hanging_gpu_leaves_its_cells_empty_and_the_others_rows_on_time(
    make_reader: MakeReader, tmp_path: Path
) -> None:
    first, second = make_reader("GPU-a"), make_reader("GPU-b")
    second.info = gpu_info("GPU-b", 1)
    with Recorder([first, second], options(tmp_path, rate=100.0, csv=True, grace_seconds=0.1)) as running:
        wait_for(lambda: running.stats.gpus["GPU-a"].samples > 10, "both being recorded")
        first.hang()
        before = running.stats.gpus["GPU-b"].samples
        wait_for(lambda: running.stats.gpus["GPU-b"].samples > before + 60, "the other one going on")
        first.release()
        wait_for(lambda: running.stats.gpus["GPU-a"].samples > 30, "its return")
    (path,) = tmp_path.iterdir()
    lines = list(csv.reader(path.read_text().splitlines()))[1:]
    alone = [line for line in lines if not line[2]]
    assert len(alone) >= 50
    assert all(line[4] == "300.000" for line in alone)
    assert [line[1] for line in lines] == sorted((line[1] for line in lines), key=float)


def test_the_runs_own_words_are_in_the_rows(make_reader: MakeReader, tmp_path: Path) -> None:
    said = tmp_path / "said.json"
    training = TrainingFile(said)
    assert training() == {}
    with Recorder([make_reader("GPU-a")], options(tmp_path, rate=100.0, training=training)) as running:
        said.write_text(json.dumps({"epoch": 2, "batch": 7, "phase": "training"}))
        wait_for(lambda: training()["epoch"] == 2, "the run's words")
        before = running.stats.lateness.count
        wait_for(lambda: running.stats.lateness.count > before + 20, "rows after them")
    rows = json.loads((tmp_path / "gpu_stats_lenet5_20260115_103000.json").read_bytes())
    assert rows[-1]["training_metadata"] == {"epoch": 2, "batch": 7, "phase": "training"}


def test_the_runs_words_survive_a_bad_file(tmp_path: Path) -> None:
    said = tmp_path / "said.json"
    training = TrainingFile(said)
    said.write_text('{"epoch": 1}')
    assert training() == {"epoch": 1}
    said.write_text("{")
    assert training() == {"epoch": 1}
    said.write_text("[1, 2]")
    assert training() == {}
    said.unlink()
    assert training() == {}


def test_a_full_disk_is_reported_and_sampling_goes_on(
    make_reader: MakeReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Recorder([make_reader("GPU-a")], options(tmp_path, rate=100.0, csv=True, flush_seconds=0.05))

    def full_disk(_: object) -> None:
        raise OSError(28, "No space left on device")

    with running:
        monkeypatch.setattr(running._sinks[0]._file, "append", full_disk)
        wait_for(lambda: running.problem, "the report")
        before = running.stats.lateness.count
        wait_for(lambda: running.stats.lateness.count > before + 10, "sampling going on")
    assert "No space left" in (running.problem or "")
    assert "Free some space" in (running.problem or "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 0.0}, "0.01 to 1000"),
        ({"rate": 5000.0}, "0.01 to 1000"),
        ({"columns": ("power_w", "colour")}, "unknown column colour"),
        ({"name": "a/b"}, "file's name"),
        ({"name": ""}, "file's name"),
    ],
)
def test_what_cannot_be_recorded_is_named(
    make_reader: MakeReader, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Recorder([make_reader("GPU-a")], options(tmp_path, **changes))


def test_no_gpus_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--simulate-gpus"):
        Recorder([], options(tmp_path))


def test_an_existing_file_is_not_written_over(make_reader: MakeReader, tmp_path: Path) -> None:
    (tmp_path / "gpu_metrics_20260115_103000.csv").write_text("precious")
    with pytest.raises(FileExistsError):
        Recorder([make_reader("GPU-a")], options(tmp_path, csv=True)).start()


def test_achieved_and_distinct_rates_are_told_apart(nvml: FakeNvml, tmp_path: Path) -> None:
    for gpu in nvml:
        gpu.field(186, 300_000, kind=fake_nvml.UINT, period_us=50_000, wobble=1000)
    with Recorder(open_nvidia(), options(tmp_path / "out", rate=100.0, csv=True)) as running:
        wait_for(lambda: running.stats.gpus[nvml.uuid(0)].samples > 100, "a second's worth")
    result = running.stats.as_dict()
    for gpu in result["gpus"]:
        assert gpu["achieved_rate_hz"] < 105
        assert 0 < gpu["distinct_value_rate_hz"] < 25, (
            "the sensor has news 20 times a second, however often it is asked"
        )
    text = running.stats.text()
    assert "requested 100 Hz" in text
    assert "new power values/s" in text
    assert "J by the counter" in text
    assert result["missed_ticks"] == running.stats.missed


def test_energy_by_the_counter_beside_the_integral_of_power() -> None:
    stats = GpuStats(gpu_info())
    for tick in range(101):
        energy = 5000.0 + 2.9 * tick if tick % 10 == 0 else None
        stats.add(sample(at=tick / 100, power_watts=300.0, energy_joules=energy))
    assert stats.counter_joules == pytest.approx(290.0)
    assert stats.integral_joules_beside_counter == pytest.approx(300.0)
    assert stats.rate == pytest.approx(100.0)
    stats.add(sample(at=20.0, power_watts=300.0))
    assert stats.integral_joules == pytest.approx(300.0), "nobody knows what it drew in a gap of 19 s"


def test_what_is_recorded_is_read_back(nvml: FakeNvml, tmp_path: Path) -> None:
    out, before = tmp_path / "out", time.time()
    with Recorder(open_nvidia(), options(out, rate=100.0)) as running:
        wait_for(lambda: running.stats.lateness.count > 40, "some readings")
    single, multi = (read_recording(path) for path in running.paths)
    assert {row.gpu_index for row in single.samples} == {0}
    assert {row.gpu_index for row in multi.samples} == {0, 1}
    row = multi.by_gpu[1][0]
    assert (row.power_watts, row.utilization, row.memory_used_bytes) == (300.0, 0.51, 11 << 30)
    assert row.temperatures == (("gpu", 55.0), ("memory", 62.0))
    assert before <= row.timestamp <= time.time()
