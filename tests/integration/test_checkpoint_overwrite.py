"""Scripts that overwrite one checkpoint file are killed at bad moments: they always continue from a good copy."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.stack import Stack, wait_until

# Like nanoGPT: the checkpoint is overwritten in place, and steps are printed.
SCRIPT = """
import os, sys, time, torch
path = "out/ckpt.pt"
os.makedirs("out", exist_ok=True)
begin = 0
if os.environ.get("ORCH_RESUME_FROM"):
    begin = torch.load(os.environ["ORCH_RESUME_FROM"])["iter_num"]
    assert torch.load(path)["iter_num"] == begin  # what is in the file's own place is good, too
print(f"begins at {begin}", flush=True)
TORN = os.environ["TORN"] == "1"
for step in range(begin + 1, begin + 101):
    time.sleep(0.02)
    print(f"step {step}/400: loss 1.0", flush=True)
step = begin + 100
torch.save({"iter_num": step, "w": torch.zeros(100_000)}, path)
if step == 400:
    sys.exit(0)
open(f"saved-{step}", "w").close()
if TORN:
    while not os.path.exists(f"tear-{step}"):
        time.sleep(0.01)
    with open(path, "wb") as file:
        file.write(b"PK\\x03\\x04 half of the next one")
        file.flush()
        open(f"torn-{step}", "w").close()
        time.sleep(600)
time.sleep(600)
"""
SPEC = """
version: 1
name: overwriting
entrypoint: python train.py
env: {{TORN: "{torn}"}}
resources: {{num_workers: 1, resources_per_worker: {{gpu: 0, cpu: 0.1}}}}
checkpoint: {{watch: out/ckpt.pt}}
health: {{progress: {{pattern: 'step (\\d+)/(\\d+)'}}}}
retry: {{max_no_progress: 1, max_restarts: {{infra: 10}}}}
"""


@pytest.mark.parametrize("torn", [False, True], ids=["killed right after a save", "killed while it overwrites"])
def test_every_restart_goes_on_from_the_newest_whole_file(stack: Stack, tmp_path: Path, torn: bool) -> None:
    job_id = stack.submit(SPEC.format(torn=int(torn)), tmp_path, train=SCRIPT)
    work = Path(stack.job(job_id).working_dir)
    for attempt, step in enumerate((100, 200, 300), start=1):
        wait_until(f"step {step} is saved", (work / f"saved-{step}").exists)
        if torn:
            wait_until("its copy is registered", lambda step=step: copied_step(work.parent / "watched") == step)
            (work / f"tear-{step}").touch()
            wait_until("it is torn", (work / f"torn-{step}").exists)
        os.kill(stack.pids(job_id)[0], signal.SIGKILL)
        wait_until("the next attempt begins", lambda attempt=attempt: stack.job(job_id).attempt > attempt)
    assert stack.wait(job_id).state == "SUCCEEDED"
    for attempt, step in enumerate((0, 100, 200, 300), start=1):
        assert f"begins at {step}\n" in stack.log(job_id, attempt=attempt)
    events = stack.client.events(job_id)
    told = [e.summary for e in events if e.kind == "job_noted"]
    assert len([text for text in told if "was restored" in text]) == (3 if torn else 0), told
    lost = [e.body["steps_lost"] for e in events if e.kind == "first_step" and e.attempt and e.attempt > 1]
    assert all(steps <= 30 for steps in lost), lost


def copied_step(registry: Path) -> int:
    """Return the step in the copy that the registry names; 0 while there is none."""
    if not (registry / "registry.json").exists():
        return 0
    known = json.loads((registry / "registry.json").read_text())["known"]
    copies = [registry / entry["copy"] for entry in known.values() if entry["copy"]]
    return int(torch.load(copies[0])["iter_num"]) if copies and copies[0].exists() else 0
