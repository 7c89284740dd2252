"""Measures a training step under orch beside torchrun: the same script, the same steps, every step reported.

Steps take about 2 ms and about 50 ms, after as many as fill five seconds at that length. A value is the median step
time of one run; ``cpu_outside_percent`` is the processor time of every process of orch that is not a rank (daemon, Ray,
actors, fork server, keepers) while the job trains; ``bare_ray_percent`` is that of a raylet, a control plane and two actors
that do nothing, which every gang of two on Ray has. With two ranks both cores of a small machine train, and every other process
slows them down; ``free_core`` is the same with one rank, which leaves a core to the others on such a machine. A rank has one thread, on both sides.

The C library returns memory of a step to the kernel, and how much of it depends on the place of the heap: ``of_a_step`` has the
page faults of a step and the processor time of the process and of the kernel. ``memory_kept`` is the step of 50 ms on a free core of a
script that makes the C library keep the memory: the remaining difference is the cost of orch itself.
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
from benchmarks.idle import bare_ray, members
from benchmarks.measure import interleave, parser, report, result, summary, wait_for
from benchmarks.workloads.paced import warm_up_steps

BARE_RAY_SECONDS = 10.0
SHORT, LONG = ("2000", "2"), ("200", "50")
WORKLOAD = contenders.ROOT / "benchmarks" / "workloads" / "paced.py"


def main() -> None:
    """Measure and report both step lengths, for two ranks and for one."""
    made = parser(__doc__ or "", pairs=6)
    made.add_argument("--again", action="store_true", help="the 50 ms on a free core alone, anew in the file of --json")
    arguments = made.parse_args()
    if arguments.again and not (arguments.json and arguments.json.is_file()):
        made.error("--again takes the result of an earlier run: name its file with --json")
    before = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.again else None
    bare = [] if before else bare_ray(arguments.pairs, BARE_RAY_SECONDS)
    orch = contenders.Orch()
    orch.up()
    try:
        if before:
            before["free_core"]["also"] = _length(orch, arguments.pairs, LONG, 1)
            report(before, arguments.json)
            return
        found = {
            ranks: {**_length(orch, arguments.pairs, SHORT, ranks), "also": _length(orch, arguments.pairs, LONG, ranks)}
            for ranks in (2, 1)
        }
        kept = _length(orch, arguments.pairs, (*LONG, "keep"), 1)
    finally:
        orch.close()
    report({**found[2], "free_core": found[1], "memory_kept": kept, "bare_ray_percent": summary(bare)}, arguments.json)


def _length(orch: contenders.Orch, pairs: int, options: tuple[str, ...], ranks: int) -> dict[str, Any]:
    """Measure steps of one length, ours and torchrun's. ``options`` of the workload: number, milliseconds, and more."""
    outside: list[float] = []
    counts: dict[str, list[dict[str, float]]] = {"ours": [], "torchrun": []}

    def ours() -> float:
        return _median(_ours(orch, options, outside, ranks), counts["ours"])

    def torchrun() -> float:
        return _median(_torchrun(options, ranks), counts["torchrun"])

    values = interleave({"ours": ours, "torchrun": torchrun}, pairs).values
    return result(
        "overhead",
        "s per step",
        "lower",
        values["ours"],
        {"torchrun": values["torchrun"]},
        steps=int(options[0]),
        ranks=ranks,
        cpu_outside_percent=summary(outside),
        of_a_step={
            side: {name: summary([one[name] for one in found]) for name in found[0]} for side, found in counts.items()
        },
    )


def _median(measured: dict[str, Any], counts: list[dict[str, float]]) -> float:
    counts.append(measured["of_a_step"])
    return float(statistics.median(measured["seconds"]))


def _torchrun(options: tuple[str, ...], ranks: int) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="orch-bench-"))
    target = directory / "result"
    command = [str(contenders.BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", str(WORKLOAD)]
    try:
        subprocess.run(
            [*command, str(target), *options],
            env=contenders.ENVIRONMENT,
            cwd=directory,
            check=True,
            capture_output=True,
            timeout=600,
        )
        measured: dict[str, Any] = json.loads(target.read_text())
        return measured
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _ours(orch: contenders.Orch, options: tuple[str, ...], outside: list[float], ranks: int) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="orch-bench-"))
    target = directory / "result"
    shutil.copy(WORKLOAD, directory / "paced.py")
    text = (
        f"version: 1\nname: paced\nentrypoint: python paced.py {target} {' '.join(options)}\n"
        f"resources: {{num_workers: {ranks}, resources_per_worker: {{gpu: 0, cpu: 1}}}}\n"
        'env: {OMP_NUM_THREADS: "1"}\n'
    )
    try:
        reply = orch.client.submit_text(text, cwd=str(directory))
        assert reply.job_id is not None
        job_id = reply.job_id
        warm = warm_up_steps(float(options[1]))
        wait_for("it is warm", lambda: _step(orch, job_id) > warm, 600)
        before, began = _busy_outside(orch, job_id), time.monotonic()
        wait_for("the result", target.exists, 600)
        # The ranks' own processes are left out; everything else of the home counts.
        after, ended = _busy_outside(orch, job_id), time.monotonic()
        shared = before.keys() & after.keys()
        outside.append(100.0 * sum(after[p] - before[p] for p in shared) / (ended - began))
        job = orch.client.wait(job_id, timeout_seconds=60)
        assert job.state == "SUCCEEDED", job.reason
        measured: dict[str, Any] = json.loads(target.read_text())
        return measured
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _step(orch: contenders.Orch, job_id: str) -> int:
    progress = orch.client.job(job_id).progress
    return 0 if progress is None else progress.step or 0


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
