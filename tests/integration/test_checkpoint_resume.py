"""Checkpoints of real jobs, from the command line: listed, verified, set aside, and used as the start of another job."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.stack import Stack, wait_until

SCRIPT = """
import sys, time
import torch
from orchestrator.train import context

ctx = context()
loaded = ctx.load()
weights = torch.zeros(64) if loaded is None else loaded.state["weights"]
start = 0 if loaded is None else loaded.step
print(f"begins at {start} with {weights.mean().item():.0f}", flush=True)
for step in range(start + 1, int(sys.argv[1]) + 1):
    weights += 1
    ctx.report(step=step, loss=1 / step)
    ctx.save({"weights": weights}, step=step, metrics={"loss": 1 / step})
"""
SPEC = """
version: 1
name: saver
entrypoint: python train.py {arguments}
resources: {{num_workers: 1, resources_per_worker: {{gpu: 0, cpu: 0.1}}}}
checkpoint: {{keep: 3, score_attribute: loss, score_order: min}}
retry: {{max_restarts: {{infra: 3}}}}
"""
DIRECT = SCRIPT.replace(
    "from orchestrator", "import os; os.environ.pop('ORCH_SNAPSHOT_DIR', None)\nfrom orchestrator", 1
)
"""Script that saves to storage itself, so that every step is a file."""


def listing(stack: Stack, job_id: str, *options: str) -> tuple[int, list[dict[str, object]]]:
    done = stack.orch("checkpoints", job_id, "--json", *options)
    return done.returncode, json.loads(done.stdout)["checkpoints"]


def flip(path: str) -> None:
    """Change one bit in the middle of a checkpoint's tensors."""
    file = Path(path) / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) - 40] ^= 4
    file.write_bytes(content)


def test_a_checkpoint_is_listed_verified_and_begins_another_job(stack: Stack, tmp_path: Path) -> None:
    first = stack.submit(SPEC.format(arguments="4"), tmp_path, train=DIRECT)
    assert stack.wait(first).state == "SUCCEEDED"
    code, found = listing(stack, first, "--verify")
    assert code == 0
    assert [(item["step"], item["valid"], item["score"], item["is_best"]) for item in found] == [
        (4, True, 0.25, True),
        (3, True, 1 / 3, False),
        (2, True, 0.5, False),
    ]
    flip(str(found[0]["path"]))
    assert listing(stack, first)[0] == 0  # names and manifests alone do not show it
    code, found = listing(stack, first, "--verify")
    assert (code, found[0]["valid"]) == (1, False)
    assert "SHA-256" in str(found[0]["problem"])
    shown = stack.orch("checkpoints", first, "--verify").stdout
    assert "AGE" in shown
    assert "step 4 is broken: state.safetensors was changed" in shown

    refused = stack.orch("submit", "train.yaml", "--resume-from", f"{first}@4", cwd=_written(tmp_path, "6"))
    assert refused.returncode == 2
    assert "has no good checkpoint of step 4" in refused.stderr
    assert "there are: 4, 3, 2" in refused.stderr
    for reference, begins in ((f"{first}@2", "begins at 2 with 2"), (first, "begins at 3 with 3")):
        done = stack.orch("submit", "train.yaml", "--resume-from", reference, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        second = done.stdout.strip()
        assert stack.wait(second).state == "SUCCEEDED"
        assert begins in stack.log(second)
        kept = stack.settings.paths.job(second) / "resume"
        assert [path.name[:17] for path in kept.iterdir()] == [f"step-{int(begins[10]):012d}"]


def _written(folder: Path, arguments: str) -> Path:
    (folder / "train.yaml").write_text(SPEC.format(arguments=arguments))
    return folder


AUTO = """
import time
from orchestrator.train import context

ctx = context()
for step in range(1, 41):
    time.sleep(0.01)
    ctx.report(step=step)
    if ctx.should_save(step):
        ctx.save({"step": step}, step=step)
"""


def test_events_say_how_often_a_job_saves_and_why(stack: Stack, tmp_path: Path) -> None:
    spec = "\n".join(line for line in SPEC.splitlines() if not line.startswith("checkpoint"))
    job_id = stack.submit(spec.format(arguments=""), tmp_path, train=AUTO)
    assert stack.wait(job_id).state == "SUCCEEDED"
    (told, *_) = [e.summary for e in stack.client.events(job_id) if e.kind == "job_noted"]
    assert re.match(
        r"checkpoint.interval auto: saves every (step|\d+ steps) \(.*\): a save takes .*, failures are expected every",
        told,
    )


def test_a_broken_checkpoint_is_set_aside_and_the_one_before_taken(stack: Stack, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = DIRECT + f"\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.02)\n"
    job_id = stack.submit(SPEC.format(arguments="4"), tmp_path / "job", train=script)
    wait_until("four steps are saved", lambda: [c["step"] for c in listing(stack, job_id)[1]] == [4, 3, 2])
    flip(str(listing(stack, job_id)[1][0]["path"]))
    stack.orch("pause", job_id)
    stack.wait_state(job_id, "SUSPENDED")
    gate.touch()
    stack.orch("resume", job_id)
    assert stack.wait(job_id).state == "SUCCEEDED"
    assert "begins at 3 with 3" in stack.log(job_id, attempt=2)
    told = [e for e in stack.client.events(job_id) if e.kind == "job_noted"]
    assert ["was changed" in e.summary for e in told] == [True], told
    assert "quarantined" in stack.orch("status", job_id).stdout
    broken = [item for item in listing(stack, job_id)[1] if item["valid"] is False]
    assert [item["step"] for item in broken] == [4]
    assert str(broken[0]["path"]).endswith("-a1.broken")
