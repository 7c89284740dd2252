"""The checkpoints that a job is to keep are on storage: all of an explicit interval, the best scores, the last one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import Stack

SCRIPT = """
import torch
from orchestrator.train import context
ctx = context()
for step in range(1, 31):
    loss = abs(step - 13) / 10 + 0.1
    ctx.report(step=step, total_steps=30, loss=loss)
    if ctx.should_save(step):
        ctx.save({"weights": torch.full((1000,), float(step))}, step=step, metrics={"loss": loss})
"""
SPEC = """
version: 1
name: kept
entrypoint: python train.py
resources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 0.1}}
checkpoint: {interval: 1, keep: 2, keep_best: 3, score_attribute: loss, score_order: min}
"""
TRAINER = """
import torch
from orchestrator.train import MultiGPUConfig, MultiGPUTrainingManager
data = [(torch.ones(4), torch.zeros(1)) for _ in range(100)]
config = MultiGPUConfig(batch_size=1, checkpoint_frequency=20, num_workers=0)
with MultiGPUTrainingManager(config) as manager:
    manager.setup_training(torch.nn.Linear(4, 1), data, loss_fn=torch.nn.functional.mse_loss)
    manager.fit(epochs=1)
"""
TRAINER_SPEC = """
version: 1
name: frequency
entrypoint: python train.py
resources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 0.1}}
checkpoint: {keep: 20}
"""


def listed(stack: Stack, job_id: str) -> list[dict[str, Any]]:
    saved: list[dict[str, Any]] = json.loads(stack.orch("checkpoints", job_id, "--json").stdout)["checkpoints"]
    return saved


def test_the_best_the_newest_and_no_others_of_an_explicit_interval_are_kept(stack: Stack, tmp_path: Path) -> None:
    job_id = stack.submit(SPEC, tmp_path, train=SCRIPT)
    stack.wait_state(job_id, "SUCCEEDED")
    saved = listed(stack, job_id)
    assert [item["step"] for item in saved] == [30, 29, 14, 13, 12]
    assert [item["step"] for item in saved if item["is_best"]] == [13]
    assert {item["location"] for item in saved} == {"disk"}


@pytest.mark.rare
def test_every_save_of_the_trainers_own_frequency_is_on_storage(stack: Stack, tmp_path: Path) -> None:
    job_id = stack.submit(TRAINER_SPEC, tmp_path, train=TRAINER)
    stack.wait_state(job_id, "SUCCEEDED")
    assert [item["step"] for item in listed(stack, job_id)] == [100, 80, 60, 40, 20]
