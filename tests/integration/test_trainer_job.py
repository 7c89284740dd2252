"""The training system in a real job: settings from job.yaml, figures in the status, Prometheus, traces of every rank."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import httpx
import pytest

from tests.support.stack import Stack, wait_until

SCRIPT = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from orchestrator.train import MultiGPUTrainingManager, context

inputs = torch.randint(0, 50, (4096, 8))
data = TensorDataset(inputs, inputs.sum(dim=1) % 2)

def loss(output, target):
    time.sleep(0.03)  # steps that take a while, and no processor
    return nn.functional.cross_entropy(output, target)

model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(128, 2))
with MultiGPUTrainingManager() as manager:
    print("settings", manager.config.batch_size, manager.config.max_grad_norm, flush=True)
    manager.setup_training(model, data, loss_fn=loss)
    manager.fit(100_000)
"""
SPEC = """
version: 1
name: trainer
entrypoint: python train.py
resources: {num_workers: 2, resources_per_worker: {gpu: 0, cpu: 0.1}}
trainer: {batch_size: 16, max_grad_norm: 0.5, peak_flops: 1e12, checkpoint_frequency: 20, log_interval: 1s}
"""


def test_a_job_of_the_training_system(stack: Stack, tmp_path: Path) -> None:
    job_id = stack.submit(SPEC, tmp_path, train=SCRIPT)
    try:
        stack.wait_step(job_id, 25)
        assert "settings 16 0.5" in stack.log(job_id, rank=1)
        wanted = {"loss", "grad_norm", "lr", "samples_per_second", "tokens_per_second", "mfu", "step_seconds"}

        def told() -> bool:
            progress = stack.job(job_id).progress
            return progress is not None and wanted <= set(progress.metrics)

        wait_until("the figures are in the status", told)
        shown = stack.orch("status", job_id).stdout
        assert re.search(r"speed +[\d.e+]+ samples/s  [\d.e+]+ tokens/s  MFU [\d.]+ %", shown)
        page = httpx.get(f"http://{stack.client.health().read_address}/metrics").text
        for name in ("orch_job_mfu_ratio", "orch_job_samples_total", "orch_job_tokens_total"):
            line = next(line for line in page.splitlines() if line.startswith(f'{name}{{job_id="{job_id}"'))
            assert float(line.split()[-1]) > 0
        for rank in (0, 1):
            done = stack.orch(
                "profile", job_id, "--steps", "2", "--rank", str(rank), "--output", str(tmp_path / "t.gz")
            )
            assert done.returncode == 0, done.stderr
            trace = json.loads(gzip.decompress((tmp_path / "t.gz").read_bytes()))
            names = [event.get("name", "") for event in trace["traceEvents"]]
            assert names.count("Optimizer.step#AdamW.step") == 2
            assert any("all_reduce" in name or "allreduce" in name for name in names)
        wrong = stack.orch("profile", job_id, "--rank", "2")
        assert (wrong.returncode, "has no rank 2" in wrong.stderr) == (2, True)
        stack.orch("pause", job_id)
        paused = stack.wait_state(job_id, "SUSPENDED")
        assert paused.checkpoint is not None
        stopped = [json.loads(line) for line in stack.log(job_id, rank=0).splitlines() if '"train.stop"' in line]
        assert [(line["step"], line["saved"]) for line in stopped] == [(paused.checkpoint.step, True)]
        stack.orch("resume", job_id)
        stack.wait_step(job_id, paused.checkpoint.step + 1)
        setup = [json.loads(line) for line in stack.log(job_id, rank=0).splitlines() if '"train.setup"' in line]
        assert setup[-1]["resumed_step"] == paused.checkpoint.step
    finally:
        stack.orch("cancel", job_id)
        stack.wait(job_id)
    over = stack.orch("profile", job_id)
    assert over.returncode == 5
    assert "only a running job can be traced" in over.stderr


@pytest.mark.rare
def test_a_job_without_the_training_system_cannot_be_traced(stack: Stack, tmp_path: Path) -> None:
    script = "import time\nfrom orchestrator.train import context\ncontext().report(step=1)\ntime.sleep(600)\n"
    spec = (
        SPEC.replace("name: trainer", "name: plain")
        .partition("trainer:")[0]
        .replace("num_workers: 2", "num_workers: 1")
    )
    job_id = stack.submit(spec, tmp_path, train=script)
    try:
        stack.wait_step(job_id, 1)
        refused = stack.orch("profile", job_id)
        assert refused.returncode == 5
        assert "no training loop of orchestrator.train" in refused.stderr
        assert "torch.profiler" in refused.stderr
    finally:
        stack.orch("cancel", job_id)
        stack.wait(job_id)
