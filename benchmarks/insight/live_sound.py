"""Runs healthy jobs side by side under a real daemon, with busy loops beside it, and counts the findings and the job hours.

Jobs of 1 and 2 ranks with and without simulated GPUs, short and long steps, in the manners of ``workloads/sound.py``; most of their time they sleep.
``python -m benchmarks.insight.live_sound --seconds 600 --write`` adds its job hours to the day's result and updates docs/diagnosis.md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final

from benchmarks import contenders
from orchestrator.api.errors import OrchError

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final = ROOT / "docs" / "diagnosis.md"
MARKS: Final = re.compile(r"(<!-- sound:begin -->\n)(.*?)(<!-- sound:end -->)", re.DOTALL)
MANNERS: Final = ("plain", "varied", "evaluates", "saves", "silent", "long start")
STEPS: Final = (0.5, 1.0, 2.0, 4.0)
LOAD_SECONDS: Final = 30.0
LOOP: Final = "while True: pass"
LONGEST_END_SECONDS: Final = 600.0


def specs(jobs: int, seconds: float) -> list[dict[str, Any]]:
    """Return the jobs: of 24 one of each manner with and without GPUs, with one rank and two, and each step length."""
    made = []
    for number in range(jobs):
        manner, turn = MANNERS[number % len(MANNERS)], number // len(MANNERS)
        step, ranks = STEPS[turn % len(STEPS)], 1 + (number + turn // 2) % 2
        each = {"gpu": 0.25 if turn % 2 else 0, "cpu": 0.05}
        made.append(
            {
                "version": 1,
                "name": f"sound-{manner.replace(' ', '-')}",
                "entrypoint": f"python sound.py {seconds:g} {step:g} {manner.replace(' ', '_')}",
                "resources": {"num_workers": ranks, "resources_per_worker": each},
            }
        )
    return made


class Loads(Thread):
    """Records the machine's load (of the newest minute) until ``ended`` is set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[float] = []
        self.ended = Event()

    def run(self) -> None:
        """Record it every half minute."""
        while True:
            self.seen.append(os.getloadavg()[0])
            if self.ended.wait(LOAD_SECONDS):
                return


def measure(jobs: int, seconds: float, loops: int) -> dict[str, Any]:
    """Run the jobs; return their hours and their findings."""
    orch, beside, loads = contenders.Orch(), [], Loads()
    try:
        orch.up(simulate_gpus=8)
        loads.start()
        beside = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
        where = str(contenders.WORKLOAD.parent)
        ids = [str(orch.client.submit_text(json.dumps(one), cwd=where).job_id) for one in specs(jobs, seconds)]
        due = time.monotonic() + seconds + LONGEST_END_SECONDS
        for job_id in ids:
            orch.client.wait(job_id, timeout_seconds=max(1.0, due - time.monotonic()))
        return _result([_ended(orch, job_id) for job_id in ids], loops, loads.seen)
    finally:
        loads.ended.set()
        for process in beside:
            process.kill()
            process.wait()
        orch.close()


def _ended(orch: contenders.Orch, job_id: str) -> dict[str, Any]:
    job = orch.client.job(job_id)
    try:
        events = orch.client.events(job_id)
    except OrchError as error:
        raise RuntimeError(f"the events of {job_id} cannot be read: {error}") from error
    ended = job.ended_at or time.time()
    found = [
        {"job": job.name, "kind": event.body["finding"]["kind"], "said": event.body["sentence"]}
        for event in events
        if event.kind == "finding_opened"
    ]
    return {
        "name": job.name,
        "state": job.state,
        "reason": job.reason,
        "hours": 0.0 if job.started_at is None else (ended - job.started_at) / 3600.0,
        "found": found,
    }


def _result(jobs: list[dict[str, Any]], loops: int, loads: list[float]) -> dict[str, Any]:
    return {
        "jobs": len(jobs),
        "hours": round(sum(job["hours"] for job in jobs), 3),
        "succeeded": sum(job["state"] == "SUCCEEDED" for job in jobs),
        "others": sorted({f"{job['state']}: {job['reason']}" for job in jobs if job["state"] != "SUCCEEDED"}),
        "found": [one for job in jobs for one in job["found"]],
        "loops": loops,
        "load": round(median(loads), 1),
        "highest_load": round(max(loads), 1),
        "processors": os.cpu_count(),
    }


def section(result: Mapping[str, Any]) -> str:
    """Return the text that docs/diagnosis.md shows."""
    runs = result["runs"]
    hours, jobs = sum(run["hours"] for run in runs), sum(run["jobs"] for run in runs)
    found = [one for run in runs for one in run["found"]]
    loads, most = sorted(run["load"] for run in runs), max(run["highest_load"] for run in runs)
    median_text = f"{loads[0]:g}" if loads[0] == loads[-1] else f"{loads[0]:g} to {loads[-1]:g}"
    text = (
        f"{jobs} healthy jobs, {hours:.1f} job hours, beside other work (median load {median_text}, at most {most:g}, on"
        f" {runs[0]['processors']} processors): {len(found)} {'finding' if len(found) == 1 else 'findings'}.\n"
    )
    first = {one["kind"]: one["said"] for one in reversed(found)}
    counts = Counter(one["kind"] for one in found)
    lines = "".join(f"\n- {counts[kind]} `{kind}`, the first: {sentence}" for kind, sentence in first.items())
    return f"{text}{lines}\n" if found else text


def main() -> None:
    """Measure, and print or store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long each job runs")
    parser.add_argument("--loops", type=int, default=2, help="busy loops beside them")
    parser.add_argument("--write", action="store_true", help="add to the day's result and update docs/diagnosis.md")
    options = parser.parse_args()
    run = measure(options.jobs, options.seconds, options.loops)
    print(json.dumps(run, indent=1))
    if options.write:
        today = dt.datetime.now(tz=dt.UTC).date()
        path = ROOT / "benchmarks" / "results" / f"{today}-insight_live_sound.json"
        before = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
        result = {"measure": "insight_live_sound", "runs": [*before, run]}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(MARKS.sub(lambda m: m[1] + section(result) + m[3], text), encoding="utf-8")


if __name__ == "__main__":
    main()
