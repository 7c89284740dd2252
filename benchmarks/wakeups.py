"""Measures wake-ups beside training, and their cost: every process of orch that is not a rank, while two ranks sleep and report.

Wake-ups a second do not depend on the machine or its load; ``percent`` of a core does a little. ``bare_ray`` has the same of a
raylet, a control plane and two actors that do nothing, which every gang of two on Ray has. Nothing trains here: on cores that
train, a wake-up costs more, and ``benchmarks.overhead`` measures that.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import contenders, processor
from benchmarks.idle import members
from benchmarks.measure import parser, report, result, wait_for

SETTLE_SECONDS = 15.0
WINDOW_SECONDS = 10.0
SECONDS_PER_STEP = 0.05
WORKLOAD = contenders.ROOT / "benchmarks" / "workloads" / "sleeping.py"


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__ or "", pairs=3).parse_args()
    bare = _bare_ray(arguments.pairs)
    orch = contenders.Orch()
    try:
        orch.up()
        ours = _beside_a_job(orch, arguments.pairs)
    finally:
        orch.close()
    peers = {"bare_ray": [float(one["wakeups"]) for one in bare]}
    found = result("wakeups", "wake-ups a second", "lower", [one["wakeups"] for one in ours], peers)
    report({**found, "last": ours[-1], "bare_ray": bare[-1]}, arguments.json)


def _beside_a_job(orch: contenders.Orch, windows: int) -> list[dict[str, Any]]:
    directory = Path(tempfile.mkdtemp(prefix="orch-bench-"))
    steps = int((windows + 2) * (SETTLE_SECONDS + WINDOW_SECONDS) / SECONDS_PER_STEP)
    shutil.copy(WORKLOAD, directory / WORKLOAD.name)
    text = (
        f"version: 1\nname: sleeping\nentrypoint: python {WORKLOAD.name} {steps} {SECONDS_PER_STEP}\n"
        "resources: {num_workers: 2, resources_per_worker: {gpu: 0, cpu: 1}}\n"
    )
    try:
        reply = orch.client.submit_text(text, cwd=str(directory))
        job_id = reply.job_id
        assert job_id is not None
        wait_for("it runs", lambda: orch.client.job(job_id).state == "RUNNING", 120)
        time.sleep(SETTLE_SECONDS)
        ranks = {gpu.pid for gpu in orch.client.job(job_id).gpus}
        names = {pid: name for pid, name in members(orch).items() if pid not in ranks}
        found = [processor.shares(names, WINDOW_SECONDS).shown() for _ in range(windows)]
        orch.client.cancel(job_id)
        orch.client.wait(job_id, timeout_seconds=60)
        return found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _bare_ray(windows: int) -> list[dict[str, Any]]:
    script = contenders.ROOT / "benchmarks" / "peers" / "bare_ray.py"
    command = [sys.executable, str(script), str(windows), str(WINDOW_SECONDS)]
    done = subprocess.run(command, env=contenders.ENVIRONMENT, check=True, capture_output=True, timeout=600)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
