"""Measures the idle stack: processor time and memory (PSS) of every process of a daemon that has nothing to do.

The result's ``ours`` is the daemon's share of one core, in percent; ``processes`` lists each process. There is no peer: the
processes that others leave running when idle (none for torchrun, a controller daemon for Slurm) do not do this work.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, NamedTuple

import psutil

from benchmarks import contenders
from benchmarks.measure import parser, report, result
from tests.support.processes import command_line

SETTLE_SECONDS = 10.0
WINDOW_SECONDS = 5.0


class _Process(NamedTuple):
    """Resource use of one process of the stack."""

    name: str
    pss_mib: float
    cpu_percent: float


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__ or "", pairs=6).parse_args()
    orch = contenders.Orch()
    try:
        orch.up()
        time.sleep(SETTLE_SECONDS)
        found = members(orch)
        daemon = orch.client.health().pid
        shares: dict[int, list[float]] = {pid: [] for pid in found}
        for _ in range(arguments.pairs):
            before = {pid: _busy(pid) for pid in found}
            time.sleep(WINDOW_SECONDS)
            for pid in found:
                shares[pid].append(100.0 * (_busy(pid) - before[pid]) / WINDOW_SECONDS)
        processes = [
            _Process(name, round(_pss(pid) / 2**20, 1), round(sum(shares[pid]) / len(shares[pid]), 2))
            for pid, name in found.items()
        ]
        more: dict[str, Any] = {
            "processes": [p._asdict() for p in sorted(processes, key=lambda p: -p.pss_mib)],
            "total_pss_mib": round(sum(p.pss_mib for p in processes), 1),
            "total_cpu_percent": round(sum(p.cpu_percent for p in processes), 2),
        }
        report(result("idle", "% of a core", "lower", shares[daemon], {}, **more), arguments.json)
    finally:
        orch.close()


def members(orch: contenders.Orch) -> dict[int, str]:
    """Return the name of every process of the home: the daemon, Ray's processes, and the fork servers."""
    from orchestrator.runtime.names import namespace

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


def _busy(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _pss(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().pss)


if __name__ == "__main__":
    main()
