"""``outputs`` on one machine: what a job wrote is in a place that `orch status` shows, however the job ended."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.stack import Stack, wait_until

SCRIPT = """
import os, sys, time
from pathlib import Path
Path("out/deep").mkdir(parents=True)
Path("out/deep/model.pt").write_text("weights")
Path("log.txt").write_text("not asked for")
os.symlink("/etc/passwd", "out/link")
os.symlink("/etc", "out/directory")
if "wait" in sys.argv:
    time.sleep(600)
sys.exit(int("fail" in sys.argv))
"""


def test_outputs_are_where_status_says(stack: Stack, tmp_path: Path) -> None:
    def submit(how: str) -> str:
        spec = {
            "version": 1,
            "name": f"writes-{how}",
            "entrypoint": f"python train.py {how}",
            "outputs": ["out/**"],
            "resources": {"num_workers": 1, "resources_per_worker": {"gpu": 0, "cpu": 0.1}},
            "stop_duration": "1s",
        }
        return stack.submit(json.dumps(spec), tmp_path, train=SCRIPT)

    ended = {how: submit(how) for how in ("well", "fail", "wait")}
    written = Path(stack.job(ended["wait"]).working_dir) / "out" / "directory"
    wait_until("it has written", written.is_symlink)
    stack.client.cancel(ended["wait"])
    for how, state in (("well", "SUCCEEDED"), ("fail", "FAILED"), ("wait", "CANCELLED")):
        job = stack.wait(ended[how])
        assert job.state == state
        assert job.outputs_dir == str(stack.settings.paths.outputs(job.id))
        assert job.outputs_dir in stack.orch("status", job.id).stdout.replace("\n", "")
        found = {path.relative_to(job.outputs_dir).as_posix() for path in Path(job.outputs_dir).rglob("*")}
        assert found == {"out", "out/deep", "out/deep/model.pt"}, how
