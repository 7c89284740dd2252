"""Checks reports, comparisons and estimates: how often intervals hold, a known difference, and a long record.

``python -m benchmarks.analysis_figures [--pairs N] [--json FILE]``: N series for each cell of the coverage tables. Everything but the last part is simulated from fixed
seeds and comes out the same on any machine; the long record (24 hours of 8 GPUs at 1 Hz) is reported in a process of its own; its processor time and
memory are read when it has ended.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.measure import commit, machine, parser, report, summary
from orchestrator.analysis import REPORT
from orchestrator.analysis.comparison import compare, sentence
from orchestrator.analysis.runs import read_run
from orchestrator.analysis.statistics import mean_interval
from orchestrator.core.estimates import Mark, StepHistory, time_left
from orchestrator.gpu.recording.job_record import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence

COUNTS: Final = (10, 20, 30, 50, 100, 200, 500, 2000)
MEMORIES: Final = (0.0, 0.3, 0.5, 0.8, 0.9, 0.95)
SHARES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
WARM_UP: Final = 400
START: Final = 1.7e9
MIB: Final = 2**20
KNOWN_MIB: Final = (1494.0, 1381.5)
"""Means of the two files of the source: the second is 7.5 % less."""


def main() -> None:
    """Measure all."""
    options = parser("intervals, a known difference and a long record", 1000).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "measure": "analysis_figures",
            "runs": options.pairs,
            "mean_intervals": mean_coverage(options.pairs),
            "estimates": estimate_coverage(max(50, options.pairs // 5)),
            "estimates_once_a_second": {
                f"steps of {seconds:g} s": estimate_coverage(max(50, options.pairs // 5), seconds)
                for seconds in (1.0, 0.1)
            },
            "known_difference": known_difference(Path(folder)),
            "long_record": long_record(Path(folder) / "long"),
            "machine": machine(),
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d"),
        }
    report(found, options.json)


def mean_coverage(runs: int) -> dict[str, dict[str, float]]:
    """Return the shares of 95 % intervals that held the mean, by the number of values and by the correlation of neighbours."""
    return {str(count): {str(memory): _held(count, memory, runs) for memory in MEMORIES} for count in COUNTS}


def _held(count: int, memory: float, runs: int) -> float:
    generator, held = np.random.default_rng(20090331), 0
    for _ in range(runs):
        noise = generator.normal(size=WARM_UP + count)
        for place in range(1, WARM_UP + count):
            noise[place] += memory * noise[place - 1]
        found = mean_interval(noise[WARM_UP:])
        held += found.low is not None and found.high is not None and found.low <= 0.0 <= found.high
    return round(held / runs, 4)


def estimate_coverage(jobs: int, step_seconds: float | None = None) -> dict[str, dict[str, float]]:
    """Return the shares of 95 % intervals that held the time left, by the correlation of steps and the share done.

    With ``step_seconds`` the daemon sees the newest report once a second, with the time at which it was made; else every one.
    """
    return {
        str(alike): {str(share): _estimates_held(jobs, alike, share, step_seconds) for share in SHARES}
        for alike in (0.0, 0.9, 0.98)
    }


def _estimates_held(jobs: int, alike: float, share: float, step_seconds: float | None) -> float:
    held = given = 0
    for seed in range(jobs):
        dice = random.Random(seed)
        seconds = [(step_seconds or 1.0) * each for each in _step_times(dice, dice.randrange(200, 1001), alike)]
        cut = int(share * len(seconds))
        marks, now = _marks_seen(seconds[:cut], every=step_seconds is None)
        found = time_left(marks, len(seconds), now=now)
        if found is None or found.low is None or found.high is None:
            continue
        given += 1
        held += found.low <= sum(seconds[cut:]) <= found.high
    return round(held / given, 4) if given else math.nan


def _marks_seen(seconds: list[float], *, every: bool) -> tuple[tuple[Mark, ...], float]:
    """Return the marks that the daemon keeps of the reports of these steps, and the time of the last step."""
    history, at, look = StepHistory(), START, START + 1.0
    for step, each in enumerate(seconds, 1):
        reported, at = at, at + each
        if every:
            history.add(Mark(at, 1, step))
        while look < at:
            if not every and step > 1:
                history.add(Mark(reported, 1, step - 1))
            look += 1.0
    return history.marks, at


def _step_times(dice: random.Random, steps: int, alike: float) -> list[float]:
    deviation, found = dice.gauss(0.0, 0.1), []
    for step in range(steps):
        deviation = alike * deviation + dice.gauss(0.0, 0.1 * math.sqrt(1 - alike * alike))
        found.append(max(0.2, 1 + deviation) * (5.0 if step < 2 else 1.0))
    return found


def known_difference(folder: Path) -> dict[str, Any]:
    """Compare files whose means are known, with correlated readings; return the sentence and the true difference in percent."""
    generator = np.random.default_rng(7)
    runs = []
    for name, mean in zip("AB", KNOWN_MIB, strict=True):
        wander = generator.normal(size=600)
        for place in range(1, 600):
            wander[place] += 0.8 * wander[place - 1]
        path = folder / f"{name}.json"
        rows = [_gputop_row(second, mean + 8.0 * value) for second, value in enumerate(wander - wander.mean())]
        path.write_text(json.dumps(rows))
        runs.append(read_run(path, name=name))
    found = compare(runs)
    pair = found.pairs[0]
    row = next(row for row in pair.rows if row.measure.name == "memory")
    return {"sentence": sentence(row, pair.letter), "percent": 100 * (KNOWN_MIB[1] / KNOWN_MIB[0] - 1)}


def _gputop_row(second: int, mib: float) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(START + second))
    return {"timestamp": stamp, "gpu_index": 0, "gpu_name": "A", "utilization": 90, "memory_used": mib, "power": 100}


def long_record(job: Path, *, gpus: int = 8, seconds: int = 86_400, reports: int = 5) -> dict[str, Any]:
    """Measure the cost of a report of a day: seconds, processor time, and most memory of its process."""
    write_record(job, gpus, seconds)
    costs = []
    for _ in range(reports):
        shutil.rmtree(job / REPORT, ignore_errors=True)
        costs.append(_report(job))
    names = ("seconds", "processor_seconds", "most_memory_mb")
    return {
        "samples": float(gpus * seconds),
        **{name: summary(values) for name, values in zip(names, zip(*costs, strict=True), strict=True)},
    }


def _report(job: Path) -> tuple[float, float, float]:
    """Return seconds, processor seconds and megabytes of one report, in a process as the daemon starts it."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "orchestrator.analysis.report_process", str(job)])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"the report ended with {process.returncode}")
    return time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000


def write_record(job: Path, gpus: int, seconds: int) -> None:
    """Write a job's telemetry and metrics, as orch writes them."""
    (job / "telemetry").mkdir(parents=True)
    generator = np.random.default_rng(1)
    for index in range(gpus):
        name = job / "telemetry" / f"telemetry-GPU-{index}"
        busy = np.clip(0.9 + 0.05 * generator.normal(size=seconds), 0, 1)
        lines = [",".join(COLUMNS)]
        lines += [
            f"{START + at},{busy[at]:.3f},{(12_000 + index) * MIB},{150 + 50 * busy[at]:.2f},{190 * at},55.0,1400000000,,1"
            for at in range(seconds)
        ]
        name.with_suffix(".csv").write_text("\n".join(lines) + "\n")
        gpu = {"uuid": f"GPU-{index}", "index": index, "model": "NVIDIA A10G", "vendor": "nvidia"}
        name.with_suffix(".json").write_text(json.dumps({**gpu, "memory_total_bytes": 24_576 * MIB}))
    _write_metrics(job / "metrics.jsonl", range(seconds))


def _write_metrics(path: Path, seconds: Sequence[int]) -> None:
    keys: dict[str, Any] = {"attempt": 1, "total_steps": None, "epoch": None, "phase": "training", "tokens": None}
    with path.open("w") as file:
        for at in seconds:
            row = {"at": START + at, "step": 2 * at, "samples": 64 * at, "step_seconds": 0.5}
            file.write(json.dumps({**keys, **row, "metrics": {"loss": 1 / (1 + at)}}) + "\n")


if __name__ == "__main__":
    main()
