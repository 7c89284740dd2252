"""The balance in process and the recording rules give the same answer: both are run on the same samples."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator import catalogue
from orchestrator.gpu.balance.balance import WINDOW_SECONDS, Balance, LoadWindow, Quantity
from tests.unit.gpu.support import sample

RULES = Path(__file__).parents[4] / "orchestrator" / "data" / "orch.rules.yml"
METRICS = {
    Quantity.UTILIZATION: catalogue.GPU_UTILIZATION.name,
    Quantity.MEMORY: catalogue.GPU_MEMORY_USED.name,
    Quantity.POWER: catalogue.GPU_POWER.name,
}
STEP, END = 15, 600
CASES: dict[str, list[tuple[float, float, float]]] = {
    "even": [(0.9, 10e9, 400.0)] * 4,
    "one idle of eight": [(1.0, 10e9, 400.0)] * 7 + [(0.0, 10e9, 90.0)],
    "power alone": [(1.0, 10e9, 600.0), (1.0, 10e9, 300.0)],
    "idle job": [(0.0, 1e9, 60.0), (0.02, 1e9, 60.0)],
    "one gpu": [(0.9, 10e9, 400.0)],
    "half idle": [(0.9, 10e9, 400.0), (0.0, 1e9, 60.0), (0.0, 1e9, 60.0)],
    "many": [(0.3 + 0.01 * i, (i + 1) * 1e9, 200.0 + 5 * i) for i in range(64)],
}


def wobble(case: str, gpu: int, tick: int) -> float:
    """Return a factor from 0.8 to 1 that is the same on both sides."""
    return random.Random(f"{case}/{gpu}/{tick}").uniform(0.8, 1.0)


def in_process(case: str) -> Balance:
    # Prometheus before version 3 includes the sample at the start of the window; later versions and orch exclude it.
    window = LoadWindow(WINDOW_SECONDS + 1e-6)
    for tick in range(END // STEP + 1):
        for gpu, (utilization, memory, power) in enumerate(CASES[case]):
            factor = wobble(case, gpu, tick)
            window.add(
                sample(
                    f"g{gpu}",
                    at=float(tick * STEP),
                    utilization=utilization * factor,
                    memory_used_bytes=int(memory * factor),
                    power_watts=power * factor,
                )
            )
    return window.balance([f"g{gpu}" for gpu in range(len(CASES[case]))], float(END))


def promtool_test(case: str) -> dict[str, object]:
    """Return a promtool unit test of the same samples that expects the results of this process."""
    ticks = range(END // STEP + 1)
    series = []
    for gpu, (utilization, memory, power) in enumerate(CASES[case]):
        series.append(
            {"series": f'orch_job_gpu{{job_id="a",gpu_uuid="g{gpu}",rank="{gpu}"}}', "values": f"1x{len(ticks)}"}
        )
        for quantity, value in zip(Quantity, (utilization, memory, power), strict=True):
            numbers = [value * wobble(case, gpu, tick) for tick in ticks]
            if quantity is Quantity.MEMORY:
                numbers = [float(int(number)) for number in numbers]
            values = " ".join(f"{number:.9f}" for number in numbers)
            series.append({"series": f'{METRICS[quantity]}{{gpu_uuid="g{gpu}"}}', "values": values})
    found = in_process(case)
    checks = []
    for quantity, name in METRICS.items():
        spread = found.spread(quantity)
        for rule, value in (
            ("cv1m", spread.cv if spread else None),
            ("min_per_median1m", spread.min_per_median if spread else None),
        ):
            expected = [] if value is None else [{"labels": '{job_id="a"}', "value": round(value, 3)}]
            checks.append(
                {"expr": f"round(job_id:{name}:{rule}, 0.001)", "eval_time": f"{END}s", "exp_samples": expected}
            )
    return {"name": case, "interval": f"{STEP}s", "input_series": series, "promql_expr_test": checks}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
def test_the_recording_rules_agree(tmp_path: Path) -> None:
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [promtool_test(case) for case in CASES],
    }
    path = tmp_path / "balance.yml"
    path.write_text(json.dumps(document))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_cases_are_worth_it() -> None:
    values = {case: in_process(case).spread(Quantity.UTILIZATION) for case in CASES}
    assert values["idle job"] is None
    assert values["one gpu"] is None
    assert values["one idle of eight"] is not None
    assert values["one idle of eight"].cv > 0.3
