"""The JSON of GPUs and balances: the same keys for every GPU, there and back."""

from __future__ import annotations

import json

from orchestrator.gpu.load import GpuLoad, balance
from orchestrator.gpu.row import GpuOwner, GpuRow, gpu_row
from orchestrator.gpu.sample import Throttle
from orchestrator.gpu.sampler import Health
from tests.unit.gpu.support import full_sample, gpu_info


def test_a_row_goes_there_and_back() -> None:
    row = gpu_row(
        gpu_info(), "node1", full_sample(), holders=[GpuOwner(job_id="a-1", rank=2), GpuOwner(job_id="b-2", rank=0)]
    )
    document = json.loads(json.dumps(row.to_json()))
    assert GpuRow.from_json({**document, "from_a_newer_release": 1}) == row
    assert (row.job_id, row.rank) == ("a-1", 2)
    assert (row.sm_clock_hertz, row.temperature_celsius, row.throttle) == (1.98e9, 55.0, (Throttle.THERMAL,))
    assert row.processes[0] == {"pid": 4711, "memory_bytes": 5}


def test_a_gpu_that_does_not_answer_has_the_same_keys() -> None:
    silent = gpu_row(gpu_info(), "node1", None, health=Health.LOST, problem="gone")
    assert set(silent.to_json()) == set(gpu_row(gpu_info(), "n", full_sample()).to_json())
    assert (silent.health, silent.problem) == ("lost", "gone")
    assert (silent.utilization_ratio, silent.power_watts, silent.sampled_at) == (None, None, None)
    assert silent.memory_total_bytes == 80 << 30, "known without asking"


def test_a_balance_in_json() -> None:
    loads = {
        "g0": GpuLoad(utilization=1.0, memory=1e9, power=600.0),
        "g1": GpuLoad(utilization=1.0, memory=1e9, power=300.0),
    }
    document = json.loads(json.dumps(balance(loads).to_json()))
    assert (document["gpus"], document["silent"], document["band"]) == (2, [], "poor")
    assert document["quantities"]["utilization"]["cv"] == 0.0
    assert document["quantities"]["power"]["band"] == "poor"


def test_the_balance_of_a_single_gpu() -> None:
    document = balance({"g0": GpuLoad(utilization=1.0, memory=1.0, power=1.0)}).to_json()
    assert document == {"gpus": 1, "silent": [], "band": None, "quantities": {}}
