"""Measures the cost of watching the processes of a rank from another process, and of counting its collectives in it.

One look a second and one report every five seconds; and one collective, from its call to the rank's progress page. The rank is a real process with threads of a collective library and two loader processes. The benchmark sets the clock of
the watch, so an hour of looks takes seconds; only processor time counts. ``python -m benchmarks.insight.process_cost --write`` stores the result.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from orchestrator.runtime.forkserver.torch_changes.collective_calls import count_collectives
from orchestrator.runtime.ranks.process_inspector import ProcessWatch, entered_call
from orchestrator.train.script.progress_reading import PageReader

ROOT: Final = Path(__file__).parents[2]
SECONDS: Final = 3600
CALLS: Final = 200_000
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


def collective_seconds(calls: int = CALLS) -> float:
    """Return the processor seconds that counting adds to a call of a collective; torch itself is not called."""
    world = SimpleNamespace(group_name="0", group_desc="default_pg")

    def all_reduce(group: object = None) -> bool:
        return bool(c10d._rank_not_in_group(group))  # noqa: SLF001  # the function that is counted

    def per_call() -> float:
        began = time.process_time()
        for _ in range(calls):
            all_reduce()
        return (time.process_time() - began) / calls

    c10d = SimpleNamespace(GroupMember=SimpleNamespace(WORLD=world), _rank_not_in_group=lambda group: group is None)
    plain = per_call()
    with tempfile.TemporaryDirectory() as directory:
        page = PageReader.create(Path(directory) / "page")
        os.environ["ORCH_PROGRESS_PATH"] = str(page.path)
        count_collectives(SimpleNamespace(distributed_c10d=c10d, get_process_group_ranks=lambda _: [0]))
        counted = per_call()
        call = entered_call(page.head(), os.getpid())
        page.close()
    if call is None or call.number != calls:
        raise RuntimeError(f"of {calls} calls {call.number if call else 0} were counted")
    return counted - plain


def main() -> None:
    """Measure, and print or store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the result")
    options = parser.parse_args()
    result = {**measure(), "seconds_per_collective": round(collective_seconds(), 9)}
    if options.write:
        today = dt.datetime.now(tz=dt.UTC).date()
        path = ROOT / "benchmarks" / "results" / f"{today}-insight_process_cost.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
