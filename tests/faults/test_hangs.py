"""Hangs on a real daemon: stopped or deadlocked ranks are found and reported, and the job continues; pauses are left alone."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from orchestrator.api.views import FindingView
from tests.support.stack import Stack, wait_until

TRAIN = """
import sys, threading, time
import torch, torch.distributed as dist
from orchestrator.train import context

what, first = sys.argv[1], True
dist.init_process_group("gloo")
ctx = context()
found = ctx.load()
step = found.step if found else 0
x = torch.ones(8)
last = 10**9 if what == "slow" else 120  # of those that a test cancels
while step < last:
    if what == "pauses" and step == 0 and ctx.is_main:
        time.sleep(7)
    if what == "pauses" and step == 60 and ctx.is_main:
        time.sleep(6)  # evaluates, and nobody has said so
    if what == "lock" and ctx.rank == 1 and step == 40 and ctx.attempt == 1:
        held = threading.Lock()
        held.acquire()
        held.acquire()
    began = time.perf_counter()
    while what == "slow" and time.perf_counter() - began < (0.06 if ctx.rank == 1 else 0.005):
        pass
    time.sleep(0.02)
    dist.all_reduce(x)
    step += 1
    ctx.report(step=step, total_steps=last)
    ctx.save({"step": step}, step=step)
"""
SPEC = """
version: 1
name: hangs
entrypoint: python train.py {what}
resources: {{num_workers: 2, resources_per_worker: {{gpu: 0, cpu: 0.25}}}}
health: {{{health}}}
"""


def submit(stack: Stack, directory: Path, what: str, health: str = "") -> str:
    return stack.submit(SPEC.format(what=what, health=health), directory / what, train=TRAIN)


def kinds(stack: Stack, job_id: str) -> list[str]:
    events = stack.client.events(job_id)
    return [e.body["code"] if e.kind in ("job_noted", "finding_opened") else e.kind for e in events]


def named(stack: Stack, job_id: str, kind: str) -> FindingView | None:
    """Return the job's open finding of this kind; None if there is none."""
    return next((found for found in stack.job(job_id).findings if found.kind == kind), None)


def test_stopped_and_deadlocked_ranks_are_found_and_pauses_are_not(stack: Stack, tmp_path: Path) -> None:
    """Three jobs run at once, so that their waits overlap."""
    stopped, locked = submit(stack, tmp_path, "steps"), submit(stack, tmp_path, "lock")
    paused = submit(stack, tmp_path, "pauses")
    stack.wait_step(stopped, 30)
    os.kill(stack.pids(stopped)[1], signal.SIGSTOP)
    for job_id, words in ((stopped, "rank 1 is stopped"), (locked, "rank 1 waits in a lock that nothing releases")):
        job = stack.wait(job_id)
        assert (job.state, job.restarts_by_class, job.attempt) == ("SUCCEEDED", {"hang": 1}, 2), job.reason
        (failed,) = [e for e in stack.client.events(job_id) if e.kind == "attempt_failed"]
        assert words in failed.body["failure"]["sentence"]
        assert failed.body["failure"]["failure_class"] == "hang"
        for rank in range(2):
            log = stack.log(job_id, attempt=1, rank=rank)
            assert f"stacks of rank {rank}: process" in log
            assert "train.py" in log
        assert "all_reduce" in stack.log(job_id, attempt=1, rank=0)
    job = stack.wait(paused)
    assert (job.state, job.attempt) == ("SUCCEEDED", 1)
    assert not {"no_step", "rank_stopped", "attempt_failed"} & set(kinds(stack, paused))


@pytest.mark.rare
def test_the_rank_that_the_others_wait_for_is_named(stack: Stack, tmp_path: Path) -> None:
    job_id = submit(stack, tmp_path, "slow")
    slow = wait_until("it is named", lambda: named(stack, job_id, "rank_slow"))
    assert slow.rank == 1
    assert slow.fact["factor"] > 2
    assert "rank 1 takes" in stack.orch("status", job_id).stdout
    stack.client.cancel(job_id)


PRINTS = """
import sys, time
for step in range(1, 100_000):
    print(f"step {step}/100000", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.rare
def test_steps_that_are_only_printed_are_shown_and_their_hang_is_told(stack: Stack, tmp_path: Path) -> None:
    health = r"progress: {pattern: 'step (\d+)/(\d+)'}"
    job_id = stack.submit(SPEC.format(what="x", health=health), tmp_path / "prints", train=PRINTS)
    job = stack.wait_step(job_id, 20)
    assert job.progress is not None
    assert job.progress.total_steps == 100_000
    pid = stack.pids(job_id)[1]
    os.kill(pid, signal.SIGSTOP)
    wait_until("it is told", lambda: "rank_stopped" in kinds(stack, job_id))
    assert (stack.job(job_id).state, stack.job(job_id).attempt) == ("RUNNING", 1)
    stack.client.cancel(job_id)
    with contextlib.suppress(ProcessLookupError):  # the cancel may have ended it already
        os.kill(pid, signal.SIGCONT)
    assert stack.wait(job_id).state == "CANCELLED"
