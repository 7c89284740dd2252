"""Recordings of gputop and its relatives are read back, whole or cut off."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.gpu.recording.reading import RecordingError, read_recording

SINGLE: dict[str, Any] = {
    "timestamp": "2025-08-29T04:35:11.660455",
    "gpu_index": 0,
    "gpu_name": "AMD Radeon Pro W7900",
    "gpu_type": "AMD",
    "utilization": 95.0,
    "memory_used": 1424.3,
    "memory_total": 49152.0,
    "memory_percent": 2.9,
    "temperatures": {"Edge": 61.0, "Junction": 75.0, "Memory": 0},
    "temp_limits": {"Junction": {"critical": 110.0, "emergency": 115.0}},
    "power": 250.0,
    "power_limit": 295.0,
    "fan_speed": 40,
    "clocks": {"sclk": 2495, "mclk": 1124},
    "clock_states": {"sclk": [[0, 500], [1, 2495]]},
    "performance_level": "auto",
    "elapsed_seconds": 10.5,
    "training_metadata": {"epoch": 1, "batch": 100, "phase": "training"},
}
MULTI: dict[str, Any] = {
    "timestamp": "2025-01-15T10:30:00",
    "multi_gpu_data": [
        {
            "gpu_index": 0,
            "gpu_name": "NVIDIA A10G",
            "utilization": 85,
            "memory_used": 12800,
            "memory_total": 24576,
            "power": 150,
        },
        {
            "gpu_index": 1,
            "gpu_name": "NVIDIA A10G",
            "utilization": 80,
            "memory_used": 12750,
            "memory_total": 24576,
            "power": 0,
        },
    ],
    "aggregate_stats": {"gpu_count": 2},
}


def read(tmp_path: Path, content: str, name: str = "stats.json") -> Any:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    return read_recording(path)


def test_the_single_gpu_array(tmp_path: Path) -> None:
    recording = read(tmp_path, json.dumps([SINGLE], indent=2))
    (row,) = recording.samples
    assert row.timestamp == pytest.approx(dt.datetime.fromisoformat("2025-08-29T04:35:11.660455").timestamp())
    assert (row.gpu_name, row.vendor) == ("AMD Radeon Pro W7900", "amd")
    assert row.utilization == 0.95
    assert row.memory_used_bytes == round(1424.3 * (1 << 20))
    assert row.memory_total_bytes == 48 << 30
    assert (row.power_watts, row.power_limit_watts, row.fan) == (250.0, 295.0, 0.4)
    assert row.temperatures == (("edge", 61.0), ("junction", 75.0)), "0 degrees stood for a missing sensor"
    assert row.temperature_celsius == 61.0
    assert row.temperature_limits == (("junction", "critical", 110.0), ("junction", "emergency", 115.0))
    assert row.clocks == (("sclk", 2.495e9), ("mclk", 1.124e9))
    assert row.training == {"epoch": 1, "batch": 100, "phase": "training"}
    assert (recording.dropped, recording.repaired) == (0, False)


def test_the_multi_gpu_array(tmp_path: Path) -> None:
    recording = read(tmp_path, json.dumps([MULTI, {**MULTI, "timestamp": "2025-01-15T10:30:02"}]))
    assert [row.gpu_index for row in recording.samples] == [0, 1, 0, 1]
    assert recording.duration_seconds == 2.0, "by the times, not by the number of samples"
    assert [row.elapsed_seconds for row in recording.by_gpu[1]] == [0.0, 2.0]
    assert recording.samples[0].power_watts == 150.0
    assert recording.samples[1].power_watts is None, "0 W stood for a missing sensor"


def test_the_simple_monitors_form(tmp_path: Path) -> None:
    document = {
        "model": "lenet5",
        "samples": [
            {"timestamp": 1.7e9 + i, "gpu_id": 1, "memory_mb": 100 * i, "memory_total_mb": 1000, "gpu_utilization": 5}
            for i in range(3)
        ],
        "interval_ms": 1000,
    }
    recording = read(tmp_path, json.dumps(document))
    assert [row.memory_used_bytes for row in recording.samples] == [0, 100 << 20, 200 << 20]
    assert {row.gpu_index for row in recording.samples} == {1}
    assert recording.samples[0].utilization == 0.05


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_that_was_cut_off(tmp_path: Path, indent: int | None) -> None:
    text = json.dumps([{**SINGLE, "power": i + 1} for i in range(5)], indent=indent)
    recording = read(tmp_path, text[: len(text) - 40])
    assert [row.power_watts for row in recording.samples] == [1.0, 2.0, 3.0, 4.0]
    assert recording.repaired


def test_entries_that_are_none_are_counted(tmp_path: Path) -> None:
    content = [SINGLE, 5, {"something": "else"}, {**SINGLE, "gpu_index": "first"}, None]
    recording = read(tmp_path, json.dumps(content))
    assert (len(recording.samples), recording.dropped) == (1, 4)


def test_values_that_are_no_numbers_are_absent(tmp_path: Path) -> None:
    entry = {**SINGLE, "power": "n/a", "utilization": True, "temperatures": [1], "clocks": None, "fan_speed": "NaN"}
    (row,) = read(tmp_path, json.dumps([entry])).samples
    assert (row.power_watts, row.utilization, row.temperatures, row.clocks, row.fan) == (None, None, (), (), None)


@pytest.mark.parametrize("key", ["power", "utilization", "elapsed_seconds", "gpu_index", "fan_speed"])
def test_a_number_that_no_float_can_hold_is_absent(tmp_path: Path, key: str) -> None:
    recording = read(tmp_path, json.dumps([{**SINGLE, key: 10**400}, SINGLE]))
    assert len(recording.samples) + recording.dropped == 2


def test_the_power_log(tmp_path: Path) -> None:
    text = (
        "timestamp,elapsed_sec,gpu0_power_w,gpu0_temp_c,gpu1_power_w,gpu1_temp_c\n"
        "2025-12-21T10:30:00.000,0.000,300.5,55,,\n"
        "2025-12-21T10:30:00.010,0.010,301.5,55,299.0,54\n"
        "2025-12-21T10:30:00.020,0.020,30"
    )
    recording = read(tmp_path, text, "gpu_metrics.csv")
    assert [(row.gpu_index, row.power_watts) for row in recording.samples] == [
        (0, 300.5),
        (1, None),
        (0, 301.5),
        (1, 299.0),
    ]
    assert recording.samples[2].elapsed_seconds == pytest.approx(0.01)
    assert recording.repaired


def test_every_column_of_our_own_csv(tmp_path: Path) -> None:
    text = (
        "timestamp,elapsed_sec,gpu2_power_w,gpu2_util_pct,gpu2_mem_used_mib,gpu2_sm_clock_mhz,gpu2_energy_j,"
        "gpu2_power_limit_w,gpu2_fan_pct,gpu2_throttle,gpu2_fresh\n"
        "2025-12-21T10:30:00.000,0.000,300,85,1000,1980,5.5,700,40,thermal|power_cap,0\nbroken,line\n"
    )
    recording = read(tmp_path, text, "gpu_metrics.csv")
    (row,) = recording.samples
    assert (row.gpu_index, row.utilization, row.memory_used_bytes) == (2, 0.85, 1000 << 20)
    assert (row.clocks, row.energy_joules, row.power_limit_watts, row.fan) == ((("sm", 1.98e9),), 5.5, 700.0, 0.4)
    assert (row.throttle, row.fresh) == (("thermal", "power_cap"), False)
    assert (recording.dropped, recording.repaired) == (1, False)


@pytest.mark.parametrize("content", ["", "hello\n", '{"some": "object"}x', "a,b\n1,2\n", "timestamp,loss\n1,2\n"])
def test_what_is_no_recording_is_refused_with_what_was_expected(tmp_path: Path, content: str) -> None:
    if content.startswith("{"):
        assert read(tmp_path, content).samples == ()
    else:
        with pytest.raises(RecordingError, match="orch record"):
            read(tmp_path, content)


def test_an_empty_recording_is_one(tmp_path: Path) -> None:
    assert read(tmp_path, "[\n]\n").samples == ()


TEXT = json.dumps([SINGLE, MULTI, {**SINGLE, "training_metadata": {"phase": 'ü[]{}"\\'}}], indent=2)


@settings(max_examples=60)
@given(st.integers(1, len(TEXT)))
def test_cut_anywhere_it_never_fails_and_never_invents(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        recording = read(Path(directory), TEXT[:cut])
    whole = {(row["power"]) for row in (SINGLE, *MULTI["multi_gpu_data"]) if row["power"]}
    assert {row.power_watts for row in recording.samples} <= {float(power) for power in whole} | {None}
