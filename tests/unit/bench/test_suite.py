"""The training suite: its measurements, its decisions about claims, and a tiny real run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.analysis.statistics import Interval
from orchestrator.bench.plan import BenchError, BenchRequest, Cell
from orchestrator.bench.results import CellResult, Parts
from orchestrator.bench.suite import (
    CLAIMS,
    Claim,
    Finding,
    Measured,
    Plan,
    Quantity,
    check_claim,
    check_suite,
    plan_of,
    quantities,
    render_suite,
)
from orchestrator.cli.main import run
from tests.unit.bench.test_report import run as a_run

RATES = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0]


def result(
    cell: Cell, rate: float, *, exposed: float = 0.02, peak: int = 400, everything: int | None = None
) -> CellResult:
    parts = Parts(compute=0.9, exposed=exposed, hidden=0.01, other=0.0)
    runs = tuple(
        a_run(
            rate * one / 100,
            number,
            parts=parts,
            step_seconds=1.0,
            peak_memory_bytes=peak << 20,
            all_memory_bytes=(everything or peak) << 20,
        )
        for number, one in enumerate(RATES)
    )
    return CellResult(cell=cell, runs=runs)


def on_gpus() -> tuple[Plan, dict[Cell, CellResult]]:
    """Return a plan and results for four GPUs; each claim about them holds, except memory with accumulation."""
    plan = plan_of(model="medium", per_rank=32, ranks=(1, 2, 4), gpus=4, mixed="fp16")
    found = {cell: result(cell, 100.0 * max(cell.ranks, cell.gpus * 0.9)) for cell in plan.cells}
    found[plan.data_parallel[-1]] = result(plan.data_parallel[-1], 350.0, everything=1500)
    found[plan.mixed] = result(plan.mixed, 190.0, peak=190)
    found[plan.accumulated] = result(plan.accumulated, 170.0, peak=150)
    return plan, found


def findings(plan: Plan, found: dict[Cell, CellResult], *, gpus: bool) -> dict[tuple[Quantity, int], Finding]:
    measured = quantities(plan, found, on_gpus=gpus)
    return {(claim.quantity, claim.gpus): check_claim(claim, measured).finding for claim in CLAIMS}


def test_every_part_of_the_document_s_tables_is_measured_once() -> None:
    plan = plan_of(model="medium", per_rank=32, ranks=(1, 2, 4, 8), gpus=8, mixed="fp16")
    assert [(cell.ranks, cell.batch) for cell in plan.ddp] == [(2, 64), (4, 128), (8, 256)]
    assert [(cell.gpus, cell.batch) for cell in plan.data_parallel] == [(2, 64), (4, 128), (8, 256)]
    assert (plan.accumulated.precision, plan.accumulated.accumulate) == ("fp16", 4)
    assert {cell.model for cell in plan.other_models} == {"large", "conv", "transformer"}
    assert len(set(plan.cells)) == len(plan.cells) == 12
    alone = plan_of(model="medium", per_rank=32, ranks=(1,), gpus=0, mixed="bf16")
    assert alone.cells == (alone.single, alone.mixed, alone.accumulated)


def test_claims_are_decided_by_intervals_where_there_are_gpus() -> None:
    found = findings(*on_gpus(), gpus=True)
    assert found.pop((Quantity.ACCUMULATED_MEMORY, 1)) is Finding.FAILS
    assert found.pop((Quantity.DDP_SPEED_UP, 8)) is Finding.NEEDS_HARDWARE
    assert found.pop((Quantity.EFFICIENCY, 8)) is Finding.NEEDS_HARDWARE
    assert set(found.values()) == {Finding.HOLDS}


def test_processors_decide_no_claim_and_tell_no_memory() -> None:
    plan = plan_of(model="medium", per_rank=32, ranks=(1, 2), gpus=0, mixed="bf16")
    found = {cell: result(cell, 100.0) for cell in plan.cells}
    assert set(findings(plan, found, gpus=False).values()) == {Finding.NEEDS_HARDWARE}
    measured = quantities(plan, found, on_gpus=False)
    assert {key[0] for key in measured} == {
        Quantity.DDP_SPEED_UP,
        Quantity.EFFICIENCY,
        Quantity.COMMUNICATION_SHARE,
        Quantity.MIXED_SPEED_UP,
        Quantity.ACCUMULATED_SPEED_UP,
    }
    assert measured[Quantity.EFFICIENCY, 2].interval.value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("at_least", "low", "high", "finding"),
    [
        (True, 1.8, 2.0, Finding.HOLDS),
        (True, 1.5, 1.79, Finding.FAILS),
        (True, 1.5, 2.0, Finding.UNCLEAR),
        (False, 1.5, 1.8, Finding.HOLDS),
        (False, 1.81, 2.0, Finding.FAILS),
        (False, 1.5, 2.0, Finding.UNCLEAR),
        (True, None, None, Finding.UNCLEAR),
    ],
)
def test_a_claim_holds_or_fails_only_with_the_whole_interval(
    at_least: bool, low: float | None, high: float | None, finding: Finding
) -> None:
    claim = Claim(quantity=Quantity.MIXED_SPEED_UP, gpus=1, value=1.8, at_least=at_least, text="")
    interval = Interval(1.8, low, high)
    measured = Measured(quantity=Quantity.MIXED_SPEED_UP, gpus=1, interval=interval, on_gpus=True)
    assert check_claim(claim, {(Quantity.MIXED_SPEED_UP, 1): measured}).finding is finding


def test_what_failed_is_said_and_the_rest_is_told() -> None:
    plan, found = on_gpus()
    found[plan.mixed] = CellResult(cell=plan.mixed, error="out of memory")
    measured = quantities(plan, found, on_gpus=True)
    assert (Quantity.MIXED_SPEED_UP, 1) not in measured
    text = render_suite(
        request=BenchRequest(batch_sizes=(32,)),
        generated="now",
        device="cuda",
        plan=plan,
        results=found,
        checked=[check_claim(claim, measured) for claim in CLAIMS],
    )
    assert "failed: out of memory" in text
    assert re.search(r"\| DataParallel \| 4 \| 32 \| 350 \| 34\d-35\d \| 1,500 MiB together \|", text)
    assert "| DistributedDataParallel | 4 | 32 | 400 |" in text
    assert "| 4 | 4.00x | 100% |" in text
    assert "not measured: needs 8 GPUs" in text
    assert "its own table makes it 85 %" in text


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("trainig", {}, "--suite trainig is not known"),
        ("training", {"batch_sizes": (16, 32)}, "measures one batch size per rank, a multiple of 4: got 16,32"),
        ("training", {"batch_sizes": (6,)}, "a multiple of 4: got 6"),
        ("training", {"precision": "bf16"}, "compares fp32 with mixed precision itself, and --precision is bf16"),
        ("training", {"gpu_mode": "multi"}, "--gpu-mode and --batch-scope have no effect"),
        ("training", {"scope": "per-rank"}, "--gpu-mode and --batch-scope have no effect"),
    ],
)
def test_what_the_suite_has_no_use_for_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        check_suite(name, BenchRequest(**{"batch_sizes": (32,), **changes}))


@pytest.mark.rare
def test_a_tiny_suite_on_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = ("--suite", "training", "--batch-sizes", "4", "--ranks", "1", "--runs", "1", "--steps", "1")
    assert run(("bench", *options, "--output-dir", str(tmp_path / "out"), "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["precision"], one["accumulate"], one["num_runs"]) for one in found["results"]] == [
        ("fp32", 1, 1),
        ("bf16", 1, 1),
        ("bf16", 4, 1),
    ]
    assert {one["finding"] for one in found["claims"]} == {"not measured"}
    assert found["batch_size_is"] == "per rank"
    report = (tmp_path / "out/training_suite_medium.md").read_text()
    assert "One rank alone: there is nothing to scale." in report
    assert "needs a GPU" in report
