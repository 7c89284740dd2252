"""A job whose GPUs are idle gives them to one that needs them, and resumes from its last checkpoint when they are free."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.fake_nvml import FakeNvml
from tests.support.stack import Stack, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.rare

SCRIPT = """
import sys, time
from orchestrator.train import context
ctx = context()
found = ctx.load()
step = found.step if found else 0
print("begins at", step)
while step < int(sys.argv[1]) and not ctx.should_stop():
    step += 1
    time.sleep(0.1)
    ctx.report(step=step)
    if ctx.should_save(step):
        ctx.save({"step": step}, step=step)
"""


def spec(name: str, gpus: int, steps: int, **keys: object) -> str:
    each = {"gpu": gpus, "cpu": 0.1}
    resources = {"num_workers": 1, "resources_per_worker": each}
    return json.dumps(
        {"version": 1, "name": name, "entrypoint": f"python train.py {steps}", "resources": resources, **keys}
    )


def test_idle_gpus_go_to_a_job_that_needs_them_and_come_back(tmp_path: Path) -> None:
    driver = FakeNvml.create(tmp_path, gpus=2)
    for gpu in driver:
        gpu.utilization = 0
    stack = Stack(environ=driver.environment())
    try:
        stack.up()
        idle = stack.submit(spec("idle", 2, 1_000_000, reclaim_idle="1s"), tmp_path / "idle", train=SCRIPT)
        wait_until("its GPUs are found to do nothing", lambda: _finds(stack, idle, "gpus_unused"))
        needs = stack.submit(spec("needs", 1, 30), tmp_path / "needs", train=SCRIPT)
        assert stack.wait(needs).state == "SUCCEEDED"
        wait_until("it continues", lambda: stack.job(idle).attempt == 2)
        stack.wait_state(idle, "RUNNING")
        events = stack.client.events(idle)
        (stop,) = [event for event in events if event.kind == "stop_requested"]
        assert stop.body["fact"] == {"kind": "by_idle_reclaim", "job": needs, "seconds": 1.0}
        assert stop.summary.startswith(f"making room for {needs}: all GPUs of this job had been idle for 1s")
        saved = [event.body["step"] for event in events if event.kind == "checkpoint_saved" and event.attempt == 1]
        wait_until("it has loaded", lambda: "begins at" in stack.log(idle, attempt=2))
        assert f"begins at {max(saved)}" in stack.log(idle, attempt=2)
    finally:
        stack.close()


def _finds(stack: Stack, job_id: str, kind: str) -> bool:
    return any(finding.kind == kind for finding in stack.job(job_id).findings)
