"""A job writes arbitrary data where the daemon reads: other jobs run, all commands are answered, the daemon starts again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.stack import Stack, wait_until

SCRIPT = """
import json, math, os, sys, time
from pathlib import Path
from orchestrator.train import context
from orchestrator.train.script import progress as layout

ctx = context()
ctx.report(step=1, total_steps=10)
how, page, done = sys.argv[1], os.environ["ORCH_PROGRESS_PATH"], Path(sys.argv[2])
logs = Path("..", "logs", "attempt-0001")
bodies = {
    "saved_at": {"saved_step": 3, "saved_at": [1], "saved_path": "x"},
    "quarantined": {"quarantined": [[1]]},
    "unknown-key": {"from_the_future": 1, "saved_step": 4, "saved_at": time.time(), "saved_path": "/x"},
    "list": [1, 2],
}
if how in bodies:
    content = bytearray(Path(page).read_bytes())
    layout.FACTS.publish(content, layout.FACTS.last_counter(content) + 1, json.dumps(bodies[how]).encode())
    with open(page, "r+b") as file:
        file.write(content)
elif how == "epoch":
    ctx.report(step=2, epoch=math.inf, loss=math.nan)
elif how == "truncate":
    os.truncate(page, 100)
elif how == "logs":
    print("before", flush=True)
    for log in logs.glob("rank-*.log"):
        log.unlink()
        os.mkfifo(log)
    os.mkfifo("../metrics.jsonl.new")
    os.rename("../metrics.jsonl.new", "../metrics.jsonl")
    ctx.report(step=2)
while not done.exists():
    time.sleep(0.02)
"""
HOWS = ("saved_at", "quarantined", "unknown-key", "list", "epoch", "truncate", "logs", "well")


def spec(how: str, done: Path) -> str:
    return json.dumps(
        {
            "version": 1,
            "name": how.replace("_", "-"),
            "entrypoint": f"python train.py {how} {done}",
            "resources": {"num_workers": 1, "resources_per_worker": {"gpu": 0, "cpu": 0.1}},
        }
    )


def test_one_job_s_reports_are_its_own_affair(breakable: Stack, tmp_path: Path) -> None:
    stack, done = breakable, tmp_path / "done"
    jobs = {how: stack.submit(spec(how, done), tmp_path / how, train=SCRIPT) for how in HOWS}
    for job_id in jobs.values():
        stack.wait_state(job_id, "RUNNING")
    told = {
        how: ("unusable_report", field)
        for how, field in {
            "saved_at": "checkpoint.saved_at",
            "quarantined": "checkpoint.quarantined",
            "list": "checkpoint",
            "epoch": "epoch",
            "truncate": "page",
        }.items()
    }
    for how, (code, field) in told.items():

        def noted(job_id: str = jobs[how], code: str = code, field: str = field) -> bool:
            bodies = [event.body for event in stack.client.events(job_id) if event.kind == "job_noted"]
            return any(body["code"] == code and field in body["message"] for body in bodies)

        wait_until(f"{how} is told", noted)
    for _ in range(8):  # more than there are threads
        shown = stack.orch("logs", jobs["logs"])
        assert "is not a regular file" in shown.stdout, shown.stderr
    assert stack.orch("logs", jobs["well"], "--tail", "3").returncode == 0
    statuses = json.loads(stack.orch("status", "--json").stdout, parse_constant=pytest.fail)
    assert {job["id"] for job in statuses["jobs"]} >= set(jobs.values())
    assert not any(job["degraded"] for job in statuses["jobs"])

    stack.kill_daemon()
    stack.up()
    assert stack.orch("status").returncode == 0
    done.touch()
    for how, job_id in jobs.items():
        job = stack.wait(job_id)
        assert (job.state, job.attempt) == ("SUCCEEDED", 1), how


DEEP_SCRIPT = """
import os, sys

def nest(top, levels):
    os.makedirs(top, exist_ok=True)
    here = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below

levels = int(sys.argv[1])
nest(os.environ["ORCH_SNAPSHOT_DIR"], levels)
nest("out", levels)
open("out/result", "w").write("kept")
os.mkdir("closed", 0o000)
os.symlink("loop", "loop")
"""


@pytest.mark.rare
def test_a_job_s_trees_of_any_depth_stop_no_end_no_start_and_no_prune(breakable: Stack, tmp_path: Path) -> None:
    stack = breakable
    deep = {
        "version": 1,
        "name": "deep",
        "entrypoint": "python train.py 1500",
        "outputs": ["out/**"],
        "resources": {"num_workers": 1, "resources_per_worker": {"gpu": 0, "cpu": 0.1}},
    }
    job_id = stack.submit(json.dumps(deep), tmp_path / "deep", train=DEEP_SCRIPT)
    assert stack.wait(job_id).state == "SUCCEEDED"
    notes = [event.body["message"] for event in stack.client.events(job_id) if event.kind == "job_noted"]
    assert any("more than 100 directories deep" in note for note in notes), notes
    assert (stack.settings.paths.outputs(job_id) / "out" / "result").read_text() == "kept"
    wait_until("its snapshots are gone", lambda: not stack.leftovers(job_id))

    stack.kill_daemon()
    stack.up()
    done = stack.orch("prune", "--older-than", "0s", "--yes")
    assert done.returncode == 0, done.stderr
    assert job_id in done.stdout.split()
    assert not stack.settings.paths.job(job_id).exists()
