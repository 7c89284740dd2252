"""Jobs on a real GPU: the GPU that they get, exact resumes after kill -9, and what they leave on the GPU."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.gpu.sample import GpuInfo
from tests.gpu.jobs import MIB, Memory, submit
from tests.support.stack import Stack, process_gone, wait_until

pytestmark = pytest.mark.gpu


def test_a_rank_has_its_gpu_and_all_can_see_that(stack: Stack, gpu: GpuInfo, memory: Memory, tmp_path: Path) -> None:
    job_id = submit(stack, tmp_path, "holding", tmp_path / "over", 4096)
    stack.wait_step(job_id, 20)
    job = stack.job(job_id)
    (rank,) = job.gpus
    assert rank.pid is not None
    assert memory.pids() == {rank.pid}, "a context on the GPU that is not the rank's"
    assert memory.used() > 4096 * MIB

    def page() -> dict[str, object] | None:
        (row,) = json.loads(stack.orch("gpus", "--json").stdout)["gpus"]
        return row if row["job_id"] == job_id and (row["utilization_ratio"] or 0) > 0.5 else None

    row = wait_until("`orch gpus` shows the job, and that its GPU works", page)
    assert row["gpu_uuid"] == gpu.uuid
    (tmp_path / "over").touch()
    assert stack.wait(job_id).state == "SUCCEEDED"
    assert f"sees 1 GPU, {gpu.model}, as cuda:0" in stack.log(job_id)
    notes = [event.body["code"] for event in stack.client.events(job_id) if event.kind == "job_noted"]
    assert "started_cold" not in notes, "the fork server could not be forked"
    wait_until("its memory is free again", lambda: not memory.pids())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_killed_training_ends_with_the_same_bits(stack: Stack, tmp_path: Path, precision: str) -> None:
    one = final_state(stack, tmp_path / "undisturbed", precision, kills=0)
    other = final_state(stack, tmp_path / "killed", precision, kills=3)
    differ = [key for key, value in one["model"].items() if not torch.equal(value, other["model"][key])]
    assert not differ
    assert one["scale"] == other["scale"]
    assert one["losses"][-1] < one["losses"][0]


def final_state(stack: Stack, directory: Path, precision: str, *, kills: int) -> dict[str, Any]:
    """Run a training, kill its process ``kills`` times, each time after a save of that attempt; return its result."""
    job_id = submit(stack, directory, "exact", directory / "final.pt", precision)
    for attempt in range(1, kills + 1):
        wait_until("a save of this attempt", functools.partial(_saved, stack, job_id, attempt))
        os.kill(stack.pids(job_id)[0], signal.SIGKILL)
        wait_until("the next attempt", functools.partial(_begun, stack, job_id, attempt + 1))
    job = stack.wait(job_id)
    assert (job.state, job.attempt) == ("SUCCEEDED", kills + 1), job.failure
    state: dict[str, Any] = torch.load(directory / "final.pt", map_location="cpu")
    return state


def _begun(stack: Stack, job_id: str, attempt: int) -> bool:
    return stack.job(job_id).attempt >= attempt


def _saved(stack: Stack, job_id: str, attempt: int) -> bool:
    return any(e.kind == "checkpoint_saved" and e.attempt == attempt for e in stack.client.events(job_id))


def test_a_kill_leaves_nothing_on_the_gpu(
    stack: Stack, memory: Memory, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The next attempt gets the memory of the last one: there is not enough for both."""
    job_id = submit(stack, tmp_path, "holding", tmp_path / "over", int(0.7 * memory.total() / MIB))
    for attempt in (1, 2, 3):
        wait_until("it makes steps", functools.partial(_steps, stack, job_id, attempt))
        (pid,) = stack.pids(job_id)
        assert pid in memory.pids()
        os.kill(pid, signal.SIGKILL)
        wait_until("it has ended", functools.partial(process_gone, pid))
        wait_until("the next attempt", functools.partial(_begun, stack, job_id, attempt + 1))
        assert pid not in memory.pids()
    wait_until("the last attempt makes steps", lambda: _steps(stack, job_id, 4))
    record_property("recovery_seconds", stack.job(job_id).timings.recovery_seconds)
    stack.client.cancel(job_id)
    job = stack.wait(job_id)
    assert (job.state, job.attempt) == ("CANCELLED", 4)
    assert not memory.pids()


def _steps(stack: Stack, job_id: str, attempt: int) -> bool:
    job = stack.job(job_id)
    return job.attempt == attempt and job.state == "RUNNING" and bool(job.progress and job.progress.step)


def test_two_ranks_share_a_gpu(stack: Stack, memory: Memory, tmp_path: Path) -> None:
    half = {"num_workers": 2, "resources_per_worker": {"gpu": 0.5, "cpu": 1}}
    job_id = submit(stack, tmp_path, "exact", tmp_path / "final.pt", "bf16", "--backend", "gloo", resources=half)
    job = stack.wait(job_id)
    assert job.state == "SUCCEEDED", job.failure
    assert not memory.pids()
