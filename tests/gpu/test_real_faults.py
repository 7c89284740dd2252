"""Faults of programs on a real GPU: each is classified correctly, and the next attempt can use the GPU."""

from __future__ import annotations

import dataclasses
import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.api.views import FailureView
from tests.gpu.jobs import Memory, submit
from tests.support.stack import Stack, wait_until

pytestmark = pytest.mark.gpu
AGAIN = {"max_restarts": {"user": 1, "infra": 1, "hang": 1}, "backoff": {"initial": "0s", "max": "0s"}}


def first_failure(stack: Stack, job_id: str) -> FailureView:
    """Return the failure of the first attempt; check that the second one succeeds on the same GPU."""
    job = stack.wait(job_id)
    assert (job.state, job.attempt) == ("SUCCEEDED", 2), job.failure
    (failed,) = [event for event in stack.client.events(job_id) if event.kind == "attempt_failed"]
    known = {each.name for each in dataclasses.fields(FailureView)}
    return FailureView(**{key: value for key, value in failed.body["failure"].items() if key in known})


def test_a_gpu_without_room_is_named(stack: Stack, tmp_path: Path) -> None:
    failure = first_failure(stack, submit(stack, tmp_path, "faulty", "oom", retry=AGAIN))
    assert (failure.failure_class, failure.code) == ("user", "cuda_oom"), failure


def test_an_index_out_of_range_is_named(stack: Stack, tmp_path: Path) -> None:
    failure = first_failure(stack, submit(stack, tmp_path, "faulty", "assert", retry=AGAIN))
    assert (failure.failure_class, failure.code) == ("user", "device_assert"), failure


def test_a_write_to_nowhere_is_the_programs_fault_and_the_driver_tells_of_it(stack: Stack, tmp_path: Path) -> None:
    """Xid 31 is an error of the program: the GPU is healthy."""
    before = xids(stack, 31)
    failure = first_failure(stack, submit(stack, tmp_path, "faulty", "pointer", retry=AGAIN))
    assert failure.failure_class == "user", failure
    assert "illegal memory access" in failure.sentence, failure
    wait_until("the exporter has counted it", lambda: xids(stack, 31) == before + 1)
    assert all(gpu.condition == "ok" for node in stack.client.nodes() for gpu in node.gpus)


def xids(stack: Stack, number: int) -> int:
    """Return how many Xid events of a number the exporters have counted."""
    address = stack.client.health().read_address
    with urllib.request.urlopen(f"http://{address}/api/v1/prometheus/targets", timeout=30) as answer:
        targets = [group["targets"][0] for group in json.load(answer)]
    pages = ""
    for target in targets:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as answer:
            pages += answer.read().decode()
    found = re.findall(rf'orch_gpu_xid_errors_total{{[^}}]*xid="{number}"[^}}]*}} (\d+)', pages)
    return sum(map(int, found))


def test_a_kernel_that_never_ends_is_a_hang(
    stack: Stack, memory: Memory, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    health = {"heartbeat_timeout": "5s"}
    began = time.monotonic()
    job_id = submit(stack, tmp_path, "faulty", "hang", retry=AGAIN, health=health)
    failure = first_failure(stack, job_id)
    record_property("seconds", time.monotonic() - began)
    record_property("sentence", failure.sentence)
    assert failure.failure_class == "hang", failure
    wait_until("its GPU is free", lambda: not memory.pids())


def test_a_job_that_leaves_its_gpu_alone_is_told(stack: Stack, tmp_path: Path) -> None:
    job_id = submit(stack, tmp_path, "forgetful", tmp_path / "over")
    wait_until("it is found", lambda: any(f.kind == "gpus_unused" for f in stack.job(job_id).findings))
    (tmp_path / "over").touch()
    assert stack.wait(job_id).state == "SUCCEEDED"
