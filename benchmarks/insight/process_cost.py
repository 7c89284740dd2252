"""Measures the cost of watching the processes of a rank from another process.

One look a second and one report every five seconds. The rank is a real process with threads of a collective library and two loader processes. The benchmark sets the clock of
the watch, so an hour of looks takes seconds; only processor time counts. ``python -m benchmarks.insight.process_cost --write`` stores the result.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from orchestrator.runtime.ranks.process_inspector import ProcessWatch

ROOT: Final = Path(__file__).parents[2]
SECONDS: Final = 3600
THREADS: Final = 40
RANK: Final = f"""
import multiprocessing, threading, sys
def wait(): threading.Event().wait()
loaders = [multiprocessing.get_context("fork").Process(target=wait, daemon=True) for _ in range(2)]
for loader in loaders: loader.start()
for number in range({THREADS}): threading.Thread(target=wait, daemon=True).start()
print("up", flush=True)
sys.stdin.read()
"""


def measure(seconds: int = SECONDS) -> dict[str, Any]:
    """Return the processor seconds of a second of looks. The rank and its loaders end with their input."""
    now = [0.0]
    watch = ProcessWatch(clock=lambda: now[0])
    with subprocess.Popen([sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        if rank.stdout is None or rank.stdout.readline() != b"up\n":
            raise RuntimeError("the rank did not start; run it by hand: RANK in benchmarks/insight/process_cost.py")
        began = time.process_time()
        for _ in range(seconds):
            now[0] += 1.0
            watch.look(rank.pid, rank.pid)
        used = time.process_time() - began
    newest = watch.newest
    if newest is None or newest.looks < seconds - 5:
        raise RuntimeError(f"of {seconds} looks {newest.looks if newest else 0} were told")
    return {
        "measure": "insight_process_cost",
        "seconds": seconds,
        "threads": THREADS,
        "cores_per_rank": round(used / seconds, 7),
        "load": os.getloadavg()[1],
        "processors": os.cpu_count(),
    }


def main() -> None:
    """Measure, and print or store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the result")
    options = parser.parse_args()
    result = measure()
    if options.write:
        today = dt.datetime.now(tz=dt.UTC).date()
        path = ROOT / "benchmarks" / "results" / f"{today}-insight_process_cost.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
