"""What a training step costs under orch beside torchrun: the same script, the same steps, every step reported.

For steps of about 2 ms and of about 50 ms. A value is the median step time of one run; ``cpu_outside_percent`` is the processor
time of everything of orch's that is not a rank (daemon, Ray, actors, fork server, keepers) while the job trains.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import contenders
from benchmarks.idle import members
from benchmarks.measure import interleave, parser, report, result, summary, wait_for

WORKLOAD = contenders.ROOT / "benchmarks" / "workloads" / "paced.py"


def main() -> None:
    """Measure and report both step lengths."""
    arguments = parser(__doc__ or "", pairs=6).parse_args()
    orch = contenders.Orch()
    orch.up()
    found: dict[str, Any] = {}
    try:
        for milliseconds, steps in ((2.0, 2000), (50.0, 200)):
            outside: list[float] = []
            arms = {
                "ours": lambda m=milliseconds, s=steps, o=outside: _ours(orch, s, m, o),
                "torchrun": lambda m=milliseconds, s=steps: _torchrun(s, m),
            }
            values = interleave(arms, arguments.pairs).values
            found[f"{milliseconds:g}ms"] = result(
                "overhead",
                "s per step",
                "lower",
                values["ours"],
                {"torchrun": values["torchrun"]},
                steps=steps,
                cpu_outside_percent=summary(outside),
            )
    finally:
        orch.close()
    report({**found["2ms"], "also": found["50ms"]}, arguments.json)


def _torchrun(steps: int, milliseconds: float) -> float:
    directory = Path(tempfile.mkdtemp(prefix="orch-bench-"))
    target = directory / "result"
    command = [str(contenders.BIN / "torchrun"), "--standalone", "--nproc-per-node=2", str(WORKLOAD)]
    try:
        subprocess.run(
            [*command, str(target), str(steps), str(milliseconds)],
            env=contenders.ENVIRONMENT,
            cwd=directory,
            check=True,
            capture_output=True,
            timeout=600,
        )
        return statistics.median(json.loads(target.read_text()))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _ours(orch: contenders.Orch, steps: int, milliseconds: float, outside: list[float]) -> float:
    directory = Path(tempfile.mkdtemp(prefix="orch-bench-"))
    target = directory / "result"
    shutil.copy(WORKLOAD, directory / "paced.py")
    text = (
        f"version: 1\nname: paced\nentrypoint: python paced.py {target} {steps} {milliseconds}\n"
        "resources: {num_workers: 2, resources_per_worker: {gpu: 0, cpu: 1}}\n"
    )
    try:
        reply = orch.client.submit_text(text, cwd=str(directory))
        assert reply.job_id is not None
        job_id = reply.job_id
        wait_for("it runs", lambda: orch.client.job(job_id).progress)
        before, began = _busy_outside(orch, job_id), time.monotonic()
        wait_for("the result", target.exists, 600)
        # The ranks' own processes are left out; everything else of the home counts.
        after, ended = _busy_outside(orch, job_id), time.monotonic()
        shared = before.keys() & after.keys()
        outside.append(100.0 * sum(after[p] - before[p] for p in shared) / (ended - began))
        job = orch.client.wait(job_id, timeout_seconds=60)
        assert job.state == "SUCCEEDED", job.reason
        return statistics.median(json.loads(target.read_text()))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _busy_outside(orch: contenders.Orch, job_id: str) -> dict[int, float]:
    ranks = {gpu.pid for gpu in orch.client.job(job_id).gpus}
    busy: dict[int, float] = {}
    for pid in members(orch):
        if pid not in ranks:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                busy[pid] = times.user + times.system
    return busy


if __name__ == "__main__":
    main()
