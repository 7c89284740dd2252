"""The main job, as a user runs it: submit, train, lose a rank, recover, finish."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.stack import Stack, process_gone, wait_until

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


def test_the_digits_example_trains_survives_a_kill_and_ends_with_a_good_model(stack: Stack) -> None:
    done = stack.orch("submit", "job.yaml", "--set", "entrypoint=python train.py --epochs 20", cwd=DIGITS)
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    stack.wait_step(job_id, 100)
    os.kill(stack.pids(job_id)[1], signal.SIGKILL)
    job = stack.wait(job_id)
    assert job.state == "SUCCEEDED", job.failure
    assert job.restarts_by_class == {"infra": 1}
    assert job.attempts[0].reason == "rank 1 was killed by SIGKILL"
    assert len(job.timings.recovery_seconds) == 1
    assert job.progress is not None
    assert (job.progress.metrics["accuracy"] or 0) >= 0.95
    assert job.checkpoint is not None
    kinds = [event.kind for event in stack.client.events(job_id)]
    assert kinds[0] == "job_submitted"
    # The rank actor reports the last checkpoint once it is on storage, which may be just after the ranks have ended.
    assert [kind for kind in kinds if kind != "checkpoint_saved"][-1] == "job_finished"
    assert kinds.count("attempt_started") == 2


def test_cancel_ends_the_whole_tree_grandchildren_and_daemonised_ones_too(stack: Stack, tmp_path: Path) -> None:
    script = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("daemon.pid", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
open("child.pid.new", "w").write(str(child.pid))
os.rename("child.pid.new", "child.pid")
time.sleep(600)
"""
    spec = """
version: 1
name: stubborn
entrypoint: python train.py
resources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 0.1}}
stop_duration: 1s
"""
    job_id = stack.submit(spec, tmp_path, train=script)
    work = Path(stack.wait_state(job_id, "RUNNING").working_dir)
    pids = [
        int(wait_until(f"{name} is written", lambda name=name: (work / name).exists() and (work / name).read_text()))
        for name in ("child.pid", "daemon.pid")
    ]
    pids += stack.pids(job_id)
    assert all(psutil.pid_exists(pid) for pid in pids)
    assert stack.orch("cancel", job_id).returncode == 0
    job = stack.wait(job_id)
    assert job.state == "CANCELLED"
    assert all(process_gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("script", "expected_code", "sentence"),
    [
        ("raise ValueError('the data is bad')", 1, "raised ValueError: the data is bad"),
        ("import sys; sys.exit(3)", 3, "ended with exit code 3"),
        ("import os; os.abort()", 134, "was killed by SIGABRT"),
    ],
)
def test_a_failing_script_is_named_with_its_reason(
    stack: Stack, tmp_path: Path, script: str, expected_code: int, sentence: str
) -> None:
    spec = """
version: 1
name: failing
entrypoint: python train.py
resources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 0.1}}
retry: {max_restarts: {infra: 0}}
"""
    job = stack.wait(stack.submit(spec, tmp_path, train=f"print('about to fail')\n{script}\n"))
    assert job.state == "FAILED"
    assert job.exit_code == expected_code
    assert job.failure is not None
    assert sentence in job.failure.sentence
    assert "about to fail" in job.failure.log_tail
