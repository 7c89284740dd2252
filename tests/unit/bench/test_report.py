"""Results and their report: speed-ups, uncertain speed-ups, and the sentences about them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.bench.plan import Cell
from orchestrator.bench.report import Subject, conclusion, recommendation, render_report
from orchestrator.bench.results import CellResult, GpuUse, Parts, Run, cell_json, compare, comparison_json, run_of

ENVIRONMENT: dict[str, Any] = {
    "cpu": "test", "cpus": 2, "threads_per_rank": 1, "system": "Linux", "load_average": [0.1, 0.2, 0.3],
    "versions": {"torch": "2.6", "cuda": None}, "settings": {"NCCL_ALGO": "Ring"}, "topology": "GPU0 GPU1 NV4",
    "gpus": [{"model": "H100", "driver": "555.1", "clocks_hertz": {"sm": 1.98e9}}],
}  # fmt: skip


def run(rate: float, number: int = 0, **changes: Any) -> Run:
    values: dict[str, Any] = {
        "number": number, "samples_per_second": rate, "step_seconds": 64 / rate,
        "parts": Parts(compute=48 / rate, exposed=12 / rate, hidden=6 / rate, other=4 / rate),
        "peak_memory_bytes": 300 << 20, "all_memory_bytes": 600 << 20, "reduced_bytes": 217612.0, "buckets": 1, "warm_up_steps": 20, "stable": True,
        "gpu": GpuUse(),
    }  # fmt: skip
    return Run(**{**values, **changes})


def cell(ranks: int, rates: list[float], batch: int = 64, **changes: Any) -> CellResult:
    runs = tuple(run(rate, number, **changes) for number, rate in enumerate(rates))
    return CellResult(cell=Cell(batch=batch, ranks=ranks), runs=runs)


SINGLE = cell(1, [100.0, 101.0, 99.0, 100.5, 99.5, 100.0])
FASTER = cell(2, [150.0, 151.0, 149.0, 150.5, 149.5, 150.0])
SLOWER = cell(2, [80.0, 81.0, 79.0, 80.5, 79.5, 80.0])
NOISY = cell(2, [60.0, 240.0, 80.0, 200.0, 70.0, 160.0])


def subject(**changes: Any) -> Subject:
    values: dict[str, Any] = {
        "model": "medium", "parameters": 54403, "precision": "fp32", "device": "cpu", "runs": 6, "steps": 100,
        "generated": "2026-11-23 10:00:00", "environment": ENVIRONMENT,
    }  # fmt: skip
    return Subject(**{**values, **changes})


@pytest.mark.parametrize(
    ("multi", "finding", "said"),
    [
        (FASTER, "faster", "multi-GPU beneficial"),
        (cell(2, [104.0, 105.0, 103.0, 104.5, 103.5, 104.0]), "faster", "multi-GPU faster, by little"),
        (SLOWER, "slower", "single GPU preferred"),
        (NOISY, "unclear", "no difference shown"),
        (cell(2, [200.0] * 4), "unclear", "unclear: fewer than 5 runs"),
    ],
)
def test_a_speed_up_is_called_one_only_where_its_interval_says_so(multi: CellResult, finding: str, said: str) -> None:
    (found,) = compare([SINGLE, multi])
    assert (found.finding, recommendation(found)) == (finding, said)


def test_only_equal_global_batches_are_compared() -> None:
    assert compare([SINGLE, cell(2, [1.0] * 6, batch=128)]) == ()
    assert compare([CellResult(cell=Cell(batch=64, ranks=1), error="broken"), FASTER]) == ()
    assert compare([SINGLE, CellResult(cell=Cell(batch=64, ranks=2), error="broken")]) == ()


def test_efficiency_is_speed_up_per_rank() -> None:
    (found,) = compare([SINGLE, FASTER])
    assert found.efficiency == pytest.approx(0.75)
    assert comparison_json(found)["speedup"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("multi", "words"),
    [
        ([FASTER], "faster at every batch size"),
        ([SLOWER], "one rank is faster at every batch size"),
        ([NOISY], "show no batch size"),
        ([SLOWER, cell(4, [300.0, 301.0, 299.0, 300.0, 300.0, 300.0])], "faster at a global batch of 64"),
    ],
)
def test_the_conclusion_covers_all_rows(multi: list[CellResult], words: str) -> None:
    assert words in conclusion(compare([SINGLE, *multi]))


def test_a_run_lasts_as_long_as_its_slowest_rank() -> None:
    parts = {"compute_seconds": 0.006, "exposed_seconds": 0.002, "hidden_seconds": 0.001, "bytes": 8.0, "buckets": 2.0}
    answers = [
        {"seconds": 0.8, "peak_memory_bytes": 5, "all_memory_bytes": 5, "warm_up_steps": 20, "stable": True, "parts": parts},
        {"seconds": 1.0, "peak_memory_bytes": 7, "all_memory_bytes": 7, "warm_up_steps": 20, "stable": False, "parts": {**parts, "exposed_seconds": 0.0}},
    ]  # fmt: skip
    found = run_of(3, Cell(batch=32, ranks=2), answers, 100, GpuUse())
    assert found.samples_per_second == 3200
    assert (found.peak_memory_bytes, found.all_memory_bytes) == (7, 12)
    assert not found.stable
    assert found.parts.exposed == pytest.approx(0.001)
    assert found.parts.other == pytest.approx(0.01 - 0.006 - 0.001)


def test_the_report_has_every_figure_and_says_what_a_batch_size_is() -> None:
    text = render_report(subject(price_per_gpu_hour=2.5), [SINGLE, FASTER])
    assert "54,403 trainable parameters" in text
    assert "Batch sizes are global" in text
    assert text.count("Batch size (global)") == 3
    assert "| 64 | 32 | 2 | 100 | 150 | 1.50x (1." in text
    assert "**Average speed-up**: 1.50x over 1 row" in text
    assert "cost per million samples" in text
    assert "NCCL_ALGO=Ring" in text
    assert "GPU0 GPU1 NV4" in text
    assert "sm 1980 MHz" in text


def test_what_went_wrong_is_in_the_report() -> None:
    failed = CellResult(cell=Cell(batch=128, ranks=2), error="rank 1: out of memory")
    far = cell(1, [100.0, 100.1, 99.9, 100.0, 100.0, 10.0], batch=32, stable=False)
    text = render_report(subject(), [SINGLE, far, failed])
    assert "2 ranks, global batch 128: failed: rank 1: out of memory" in text
    assert "10 samples/s in run 5" in text
    assert "not stable after the longest warm-up in 6 of 6 runs" in text
    assert "Nothing to compare" in text


def test_json_has_the_known_keys_and_null_for_what_was_not_measured() -> None:
    found = cell_json(FASTER, model="medium", parameters=54403, precision="fp32")
    assert {
        "batch_size", "model_type", "multi_gpu", "num_runs", "mean_samples_per_sec", "std_samples_per_sec",
        "confidence_interval_95", "mean_memory_mb", "mean_gpu_utilization", "mean_communication_ms",
        "model_parameters", "detailed_runs",
    } <= set(found)  # fmt: skip
    assert found["mean_gpu_utilization"] is None
    assert found["mean_memory_mb"] == 300
    low, high = found["confidence_interval_95"]
    assert low < found["mean_samples_per_sec"] < high
    assert len(found["detailed_runs"]) == 6
    json.dumps(found, allow_nan=False)
