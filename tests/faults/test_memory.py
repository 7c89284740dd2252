"""A rank that exceeds its memory limit is killed: the job's failure says what happened, and the node agent runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.runtime.forkserver import cgroups
from tests.support.processes import node_agents
from tests.support.stack import Stack

_PLACE = cgroups.find_place()

EATER = """
import os
held = []
while os.environ["RANK"] == "1":
    held.append(bytearray(b"x" * (16 << 20)))
import time
time.sleep(600)
"""


@pytest.mark.skipif(_PLACE is None or not _PLACE.has_memory, reason="control groups cannot be made here")
def test_a_rank_at_its_limit_is_named_with_what_it_used_and_asked_for(stack: Stack, tmp_path: Path) -> None:
    agents = node_agents(stack)
    spec = """
version: 1
name: eater
entrypoint: python train.py
resources:
  num_workers: 2
  resources_per_worker: {gpu: 0, cpu: 0.1, memory: 500MiB}
retry: {max_restarts: {infra: 0}}
"""
    job_id = stack.submit(spec, tmp_path / "work", train=EATER)
    job = stack.wait(job_id)
    assert job.failure is not None
    assert (job.state, job.failure.rank) == ("FAILED", 1)
    assert "rank 1: the kernel killed it because it reached its memory limit of 500MiB" in job.failure.sentence
    assert "it asked for 500MiB" in job.failure.sentence
    assert "raise resources_per_worker.memory" in job.failure.advice
    failed = [event for event in stack.client.events(job_id) if event.kind == "attempt_failed"]
    assert failed[0].body["failure"]["code"] == "memory_limit"
    exits = [event for event in stack.client.events(job_id) if event.kind == "rank_exited" and event.body["rank"] == 1]
    assert exits[0].body["memory"]["killed"] == "limit"
    assert node_agents(stack) == agents
