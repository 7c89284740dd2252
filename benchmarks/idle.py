"""Measures what orch uses while nothing trains: processor time and memory (PSS) of every process of a daemon with nothing to do.

The result's ``ours`` is the daemon's share of one core, in percent; ``processes`` lists each process. ``beside_a_job`` is the share of all
processes that are not ranks while two ranks sleep and report, and ``bare_ray`` that of a raylet, a control plane and two actors that do
nothing, which every gang of two on Ray has. There is no other peer: the processes that others leave running when idle (none for torchrun, a
controller daemon for Slurm) do not do this work.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import contenders
from benchmarks.measure import parser, percent_of_a_core, ratio, report, result, summary, wait_for
from tests.support.processes import command_line

SETTLE_SECONDS = 10.0
WINDOW_SECONDS = 5.0
SECONDS_PER_STEP = 0.05
WORKLOAD = contenders.ROOT / "benchmarks" / "workloads" / "sleeping.py"


class _Process(NamedTuple):
    """Resource use of one process of the stack."""

    name: str
    pss_mib: float
    cpu_percent: float


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__ or "", pairs=6).parse_args()
    bare = bare_ray(arguments.pairs, WINDOW_SECONDS)
    orch = contenders.Orch()
    try:
        orch.up()
        time.sleep(SETTLE_SECONDS)
        found = members(orch)
        daemon = orch.client.health().pid
        shares: dict[int, list[float]] = {pid: [] for pid in found}
        for _ in range(arguments.pairs):
            for pid, percent in percent_of_a_core(found, WINDOW_SECONDS).items():
                shares[pid].append(percent)
        processes = [
            _Process(found[pid], round(_pss(pid) / 2**20, 1), round(sum(each) / len(each), 2))
            for pid, each in shares.items()
            if each
        ]
        beside = _beside_a_job(orch, arguments.pairs)
    finally:
        orch.close()
    more: dict[str, Any] = {
        "processes": [p._asdict() for p in sorted(processes, key=lambda p: -p.pss_mib)],
        "total_pss_mib": round(sum(p.pss_mib for p in processes), 1),
        "total_cpu_percent": round(sum(p.cpu_percent for p in processes), 2),
        "beside_a_job": summary(beside),
        "bare_ray": summary(bare),
        "beside_a_job_over_bare_ray": ratio(beside, bare),
    }
    report(result("idle", "% of a core", "lower", shares[daemon], {}, **more), arguments.json)


def _beside_a_job(orch: contenders.Orch, windows: int) -> list[float]:
    """Return per cent of a core of every process that is not a rank while two ranks sleep and report, in each window."""
    directory = Path(tempfile.mkdtemp(prefix="orch-bench-"))
    steps = int((windows + 2) * (SETTLE_SECONDS + WINDOW_SECONDS) / SECONDS_PER_STEP)
    shutil.copy(WORKLOAD, directory / WORKLOAD.name)
    text = (
        f"version: 1\nname: sleeping\nentrypoint: python {WORKLOAD.name} {steps} {SECONDS_PER_STEP}\n"
        "resources: {num_workers: 2, resources_per_worker: {gpu: 0, cpu: 1}}\n"
    )
    try:
        job_id = orch.client.submit_text(text, cwd=str(directory)).job_id
        assert job_id is not None
        wait_for("it runs", lambda: orch.client.job(job_id).state == "RUNNING", 120)
        time.sleep(SETTLE_SECONDS)
        others = members(orch).keys() - {gpu.pid for gpu in orch.client.job(job_id).gpus}
        found = [sum(percent_of_a_core(others, WINDOW_SECONDS).values()) for _ in range(windows)]
        orch.client.cancel(job_id)
        orch.client.wait(job_id, timeout_seconds=60)
        return found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def bare_ray(windows: int, seconds: float) -> list[float]:
    """Return per cent of a core of a Ray that does nothing, in each window."""
    script = contenders.ROOT / "benchmarks" / "peers" / "bare_ray.py"
    command = [sys.executable, str(script), str(windows), str(seconds)]
    done = subprocess.run(command, env=contenders.ENVIRONMENT, check=True, capture_output=True, timeout=600)
    return [float(percent) for percent in json.loads(done.stdout.splitlines()[-1])]


def members(orch: contenders.Orch) -> dict[int, str]:
    """Return the name of every process of the home: the daemon, Ray's processes, and the fork servers."""
    from orchestrator.runtime.nodes.directories import namespace

    markers = (str(orch.home), namespace(orch.home).removeprefix("orch-"))
    roots = {
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if any(marker in part for part in p.info["cmdline"] or () for marker in markers)
    }
    roots.add(orch.client.health().pid)
    found: dict[int, str] = {}
    for pid in roots:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that ends meanwhile is left out
            root = psutil.Process(pid)
            found.update({process.pid: _name(process) for process in (root, *root.children(recursive=True))})
    return found


def _name(process: psutil.Process) -> str:
    line = " ".join(command_line(process))
    for marker, name in (
        ("gcs_server", "ray gcs_server"),
        ("raylet/raylet", "ray raylet"),
        ("orchestrator.cli.main serve", "orch daemon"),
        ("forkserver/server.py", "fork server"),
    ):
        if marker in line:
            return name
    return line.split(" ")[0][:60] or process.name()


def _pss(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().pss)


if __name__ == "__main__":
    main()
