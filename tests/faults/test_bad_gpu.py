"""A GPU that keeps failing is quarantined, and the job continues on another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.stack import Stack, wait_until

pytestmark = pytest.mark.rare

SCRIPT = """
import time
from orchestrator.train import context
ctx = context()
if ctx.attempt <= 2:
    time.sleep(0.2)
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
ctx.report(step=1)
time.sleep(1)
"""


def test_a_gpu_that_fails_twice_is_handed_out_no_more(stack: Stack, tmp_path: Path) -> None:
    free = stack.client.nodes()[0].gpus_free
    spec = {
        "version": 1,
        "name": "unlucky",
        "entrypoint": "python train.py",
        "resources": {"num_workers": 1, "resources_per_worker": {"gpu": 1, "cpu": 0.1}},
        "retry": {"backoff": {"initial": "3s", "max": "3s"}},
    }
    job_id = stack.submit(json.dumps(spec), tmp_path / "work", train=SCRIPT)
    job = stack.wait(job_id)
    assert (job.state, job.attempt) == ("SUCCEEDED", 3), job.failure
    used = [e.body["seats"][0]["gpu_uuids"][0] for e in stack.client.events(job_id) if e.kind == "gang_placed"]
    assert used[0] == used[1], "Ray had given it the same one again"
    assert used[2] != used[0]
    (node,) = stack.client.nodes()
    bad = {gpu.uuid: gpu for gpu in node.gpus}[used[0]]
    assert not bad.healthy
    assert "2 failures began here" in bad.problem
    assert node.gpus_free == free - 1
    stack.kill_daemon()
    stack.up()
    wait_until("it is held again", lambda: stack.client.nodes()[0].gpus_free == free - 1)
    assert "quarantined: 2 failures began here" in stack.orch("nodes").stdout
    stack.client.node_action(node.name, "uncordon")
    wait_until("a person trusts it", lambda: stack.client.nodes()[0].gpus_free == free)
