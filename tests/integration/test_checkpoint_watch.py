"""A script that does not use orch saves by itself: its checkpoints are registered, handed back, retained."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.support.stack import Stack, wait_until

SCRIPT = """
import json, os, sys, time
resume = sys.argv[sys.argv.index("--resume") + 1] if "--resume" in sys.argv else None
assert resume == os.environ.get("ORCH_RESUME_FROM"), (resume, dict(os.environ))
step = 0 if resume is None else json.load(open(f"{resume}/state.json"))["step"]
print(f"begins at {step}", flush=True)
while step < 6:
    step += 1
    os.makedirs(f"out/ckpt-{step}", exist_ok=True)
    with open(f"out/ckpt-{step}/state.json", "w") as file:
        json.dump({"step": step, "pad": "x" * 1000}, file)
    if resume is None and step == 3:
        time.sleep(600)
"""
SPEC = """
version: 1
name: byitself
entrypoint: python train.py --resume ${checkpoint} --epochs 3
resources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 0.1}}
checkpoint: {watch: "out/ckpt-*", keep: 2}
"""


def test_a_script_that_saves_by_itself_gets_its_newest_good_checkpoint_back(stack: Stack, tmp_path: Path) -> None:
    job_id = stack.submit(SPEC, tmp_path, train=SCRIPT)

    def saved() -> list[int]:
        listed = json.loads(stack.orch("checkpoints", job_id, "--json").stdout)["checkpoints"]
        return [item["step"] for item in listed]

    wait_until("the newest two of three are kept", lambda: saved() == [3, 2])
    out = Path(stack.job(job_id).working_dir) / "out"
    wait_until("the third is deleted", lambda: sorted(path.name for path in out.iterdir()) == ["ckpt-2", "ckpt-3"])
    facts = (out / "ckpt-3" / "state.json").stat()
    content = (out / "ckpt-3" / "state.json").read_text()
    (out / "ckpt-3" / "state.json").write_text(content.replace("xx", "xy", 1))
    os.utime(out / "ckpt-3" / "state.json", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    shown = stack.orch("checkpoints", job_id, "--verify")
    assert shown.returncode == 1
    assert "step 3 is broken: state.json was changed" in shown.stdout
    (out / "ckpt-4").mkdir()
    (out / "ckpt-4" / "state.json").write_text('{"step": 4, "pa')  # what a killed writer leaves
    os.kill(stack.pids(job_id)[0], signal.SIGKILL)
    stack.wait_state(job_id, "FAILED", "SUCCEEDED")
    assert "begins at 2" in stack.log(job_id, attempt=2)
    told = [e for e in stack.client.events(job_id) if e.kind in ("job_noted", "checkpoint_saved")]
    assert any("ckpt-3" in event.summary and "was changed" in event.summary for event in told), told
    assert any(event.kind == "checkpoint_saved" for event in told)
