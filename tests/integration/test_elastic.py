"""Real elastic jobs: under a daemon that adds and removes ranks, and in the training system on gloo."""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.stack import wait_until

if TYPE_CHECKING:
    from tests.support.stack import Stack

SCRIPT = Path(__file__).parent / "elastic_scripts" / "ledger.py"
STEPS = 40


def _ledger() -> Any:
    spec = importlib.util.spec_from_file_location("elastic_ledger", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spec(name: str, workers: str, entrypoint: str = "python train.py") -> str:
    return (
        f"name: {name}\nentrypoint: {entrypoint}\nstop_duration: 10s\ncheckpoint: {{interval: 5}}\n"
        f"resources: {{num_workers: {workers}, resources_per_worker: {{gpu: 1, cpu: 0.1}}}}\n"
    )


def expected_weights(steps: int) -> torch.Tensor:
    """Return the weights that one process computes from whole batches."""
    ledger = _ledger()
    inputs, targets = ledger.data()
    weights = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.05, momentum=0.9)
    for step in range(steps):
        epoch, position = divmod(step * ledger.BATCH, ledger.SAMPLES)
        rows = ledger.order(epoch)[position : position + ledger.BATCH]
        optimizer.zero_grad()
        ((inputs[rows] @ weights - targets[rows]) ** 2).mean().backward()
        optimizer.step()
    return weights.detach()


def samples_of_steps(result: Path) -> tuple[dict[int, list[int]], set[int]]:
    """Return, by step, the samples of its newest attempt; and all numbers of ranks that occurred."""
    newest: dict[int, int] = {}
    lines = [json.loads(line) for rank in range(4) for line in Path(f"{result}.{rank}").read_text().splitlines()]
    for line in lines:
        newest[line["step"]] = max(newest.get(line["step"], 0), line["attempt"])
    taken: dict[int, list[int]] = defaultdict(list)
    for line in lines:
        if line["attempt"] == newest[line["step"]]:
            taken[line["step"]] += line["samples"]
    return taken, {line["ranks"] for line in lines}


def test_four_ranks_become_two_and_three_and_the_result_is_that_of_one(stack: Stack, tmp_path: Path) -> None:
    stop_file, result = tmp_path / "stop", tmp_path / "result.json"
    entry = f"python train.py {STEPS} {stop_file} {result}"
    elastic = stack.submit(
        spec("elastic", "{min: 1, max: 4, grow_after: 1s}", entry), tmp_path / "elastic", train=SCRIPT.read_text()
    )
    stack.wait_step(elastic, 6)
    assert stack.job(elastic).num_workers == 4
    stack.client.pause(elastic)
    stack.wait_state(elastic, "SUSPENDED")
    waiting = "import time\ntime.sleep(600)\n"
    holders = [stack.submit(spec(f"holder-{n}", "1"), tmp_path / f"h{n}", train=waiting) for n in range(2)]
    for holder in holders:
        stack.wait_state(holder, "RUNNING")
    stack.client.resume(elastic)
    wait_until("it goes on with two", lambda: _runs_on(stack, elastic, 2))
    assert "2 of 1-4 ranks" in stack.orch("status", elastic).stdout
    stack.client.cancel(holders[0])
    wait_until("it grows to three", lambda: _runs_on(stack, elastic, 3))
    reasons = [e for e in stack.client.events(elastic) if e.kind == "stop_requested"]
    assert "to run on 3 ranks instead of 2" in reasons[-1].summary
    progress = stack.job(elastic).progress
    grown = (progress.step if progress else 0) or 0
    stack.wait_step(elastic, grown + 3)
    stop_file.touch()
    job = stack.wait(elastic)
    assert job.state == "SUCCEEDED", job.reason
    assert job.restarts == 0
    ended = json.loads(result.read_text())
    torch.testing.assert_close(torch.tensor(ended["weights"], dtype=torch.float64), expected_weights(ended["step"]))
    taken, sizes = samples_of_steps(result)
    assert sizes == {4, 2, 3}
    ledger = _ledger()
    for step in range(1, ended["step"] + 1):
        epoch, position = divmod((step - 1) * ledger.BATCH, ledger.SAMPLES)
        assert sorted(taken[step]) == sorted(ledger.order(epoch)[position : position + ledger.BATCH])
    stack.client.cancel(holders[1])


def _runs_on(stack: Stack, job_id: str, ranks: int) -> bool:
    job = stack.job(job_id)
    return job.state == "RUNNING" and job.num_workers == ranks


@pytest.mark.rare
def test_auto_is_as_many_as_are_free_and_asks_nothing_of_the_script(stack: Stack, tmp_path: Path) -> None:
    script = "from orchestrator.train import context\ncontext().report(step=context().world_size)\n"
    job = stack.wait(stack.submit(spec("auto", "auto"), tmp_path / "auto", train=script))
    assert job.state == "SUCCEEDED", job.reason
    assert job.num_workers in (3, 4)
