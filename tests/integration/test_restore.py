"""The documented restore: what the restored record does not know is ended, the job goes on from its newest checkpoint, and can be cancelled."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.stack import Stack, process_gone, wait_until

pytestmark = pytest.mark.rare

SCRIPT = """
import time
from orchestrator.train import context
ctx = context()
loaded = ctx.load()
step = loaded.step if loaded else 0
print("begins at", step, flush=True)
while True:
    time.sleep(0.05)
    step += 1
    ctx.report(step=step, total_steps=10**6)
    if step % 5 == 0:
        ctx.save({"step": step}, step=step)
"""
SPEC = """
version: 1
name: restored
entrypoint: python train.py
resources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 0.1}}
checkpoint: {interval: 1}
"""


@pytest.mark.parametrize("with_ray", [True, False])
def test_what_the_restored_record_does_not_know_is_ended_and_the_job_goes_on(tmp_path: Path, with_ray: bool) -> None:
    stack = Stack()
    try:
        stack.up()
        job_id = stack.submit(SPEC, tmp_path, train=SCRIPT)
        stack.wait_step(job_id, 10)
        backup = tmp_path / "backup.sqlite3"
        assert stack.orch("backup", str(backup)).returncode == 0
        later = stack.submit(SPEC.replace("restored", "later"), tmp_path, train=SCRIPT)
        stack.wait_step(later, 1)
        for attempt in (2, 3):
            os.kill(stack.pids(job_id)[0], signal.SIGKILL)
            wait_until("another attempt", lambda number=attempt: stack.job(job_id).attempt == number)
            stack.wait_step(job_id, 30 * attempt)
        unknown = [*stack.pids(job_id), *stack.pids(later)]
        if with_ray:
            stack.orch("down")
        else:
            stack.kill_everything()
        broken = stack.home / "broken"
        broken.mkdir()
        for file in stack.home.glob("store.sqlite3*"):
            shutil.move(file, broken)
        assert stack.orch("restore", str(backup)).returncode == 0
        stack.up()
        wait_until("what the record does not know ends", lambda: all(map(process_gone, unknown)))
        wait_until("the next attempt", lambda: stack.job(job_id).attempt == 4)
        stack.wait_state(job_id, "RUNNING")
        wait_until("its first line", lambda: "begins at" in stack.log(job_id, attempt=4))
        begun = int(stack.log(job_id, attempt=4).split("begins at ")[1].split()[0])
        assert begun >= 80, "it goes on from the newest checkpoint, not from that of the backup"
        events = stack.client.events(job_id)
        (found,) = [event for event in events if event.kind == "later_attempts_found"]
        assert found.body["attempt"] == 3
        (failed,) = [event for event in events if event.kind == "attempt_failed"]
        assert failed.body["failure"]["code"] == "gang_lost"
        assert failed.body["failure"]["failure_class"] == "preemption", "it counts against no budget of the job"
        assert stack.orch("cancel", job_id).returncode == 0
        stack.wait_state(job_id, "CANCELLED")
    finally:
        stack.close()
