"""Counts the instructions of each hot path on fixed inputs: ``python -m benchmarks.instructions [--json FILE] [--compare]``.

Counts are repeatable where times are not: on a noisy or slow machine, beside other programs. ``perf stat`` counts where the machine
permits it, else valgrind's callgrind. The same path runs a few times and many times; the difference leaves out the cost of starting
Python and importing. Hashing is seeded, addresses are not randomised, and the garbage collector runs as usual.

``--compare`` (``make instructions``) fails where a path takes over 3 % more than in the newest committed result of the same counter
and the same Python: explain the rise in the change that brings it, and commit a new result, or undo it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.hot_paths import PATHS

RESULTS: Final = Path(__file__).parent / "results"
ALLOWED_RISE: Final = 0.03
REPEATS: Final = {"parse": 20, "decide": 3, "fold": 40, "write": 10, "exporter_page": 40, "snapshot_plan": 40}
FEW: Final = 4
_CALLGRIND: Final = re.compile(r"Collected : (\d+)")
_PERF: Final = re.compile(r"^\s*([\d,.]+)\s+instructions:u", re.MULTILINE)


def counter() -> str:
    """Return ``perf`` where it counts instructions here, else ``callgrind``. Raises SystemExit with what to install."""
    if shutil.which("perf"):
        tried = subprocess.run(
            ["perf", "stat", "-e", "instructions:u", "true"], check=False, capture_output=True, text=True
        )
        if _PERF.search(tried.stderr):
            return "perf"
    if shutil.which("valgrind"):
        return "callgrind"
    raise SystemExit("no counter of instructions: install valgrind (Debian package valgrind), or linux-perf")


def count(name: str, repeats: int, how: str) -> int:
    """Return the instructions of a process that runs the path ``repeats`` times."""
    command = [sys.executable, "-m", "benchmarks.hot_paths", name, str(repeats)]
    if how == "perf":
        command = ["perf", "stat", "-e", "instructions:u", "--", *command]
    else:
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--", *command]
    if shutil.which("setarch"):
        command = ["setarch", "--addr-no-randomize", *command]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    found = (_PERF if how == "perf" else _CALLGRIND).search(done.stderr)
    if done.returncode != 0 or found is None:
        raise SystemExit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return int(re.sub(r"\D", "", found[1]))


def measure(names: list[str], how: str) -> dict[str, int]:
    """Return the instructions of one run of each path."""
    result = {}
    for name in names:
        few, many = count(name, FEW, how), count(name, FEW + REPEATS[name], how)
        result[name] = round((many - few) / REPEATS[name])
        print(f"{name}: {result[name]:,} instructions", file=sys.stderr)
    return result


def newest(how: str, results: Path = RESULTS) -> dict[str, Any] | None:
    """Return the newest committed result of the same counter and Python."""
    python = platform.python_version()
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*-instructions.json"))]
    return next((r for r in reversed(found) if r["counter"] == how and r["machine"]["python"] == python), None)


def rises(now: dict[str, int], before: dict[str, int]) -> list[str]:
    """Return a line for each path that takes more than before, beyond the allowed rise."""
    return [
        f"{name}: {count:,} instructions, {count / before[name] - 1:+.1%} against {before[name]:,}"
        for name, count in now.items()
        if name in before and count > before[name] * (1 + ALLOWED_RISE)
    ]


def main() -> int:
    """Measure, and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument(
        "--compare", action="store_true", help="fail where a path takes more than 3 %% more than committed"
    )
    parser.add_argument("--path", action="append", choices=list(PATHS), help="only this one; may be repeated")
    options = parser.parse_args()
    how = counter()
    before = newest(how) if options.compare else None
    if options.compare and before is None:
        raise SystemExit(
            f"no committed result of {how} with Python {platform.python_version()}: nothing to compare with"
        )
    now = measure(options.path or list(PATHS), how)
    result = {
        "measure": "instructions",
        "date": time.strftime("%Y-%m-%d"),
        "counter": how,
        "instructions": now,
        "machine": {"python": platform.python_version(), "machine": platform.machine()},
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    worse = rises(now, before["instructions"]) if before else []
    for line in worse:
        print(f"MORE  {line}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
