"""Compares this commit with another: short runs of each benchmark in both checkouts, in turns, and the ratio of their medians.

The other commit lies in a worktree of its own, with a virtual environment in which it is installed:

    git worktree add ../before COMMIT && cd ../before && make .venv/.installed
    python -m benchmarks.before_after ../before

Each commit is measured by its own benchmark, without peers. A ratio above 1 says that this commit is slower.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import commit, machine, parser, ratio, report, summary

HERE: Final = Path(__file__).parents[1]
MOST: Final = 1.03
"""Bound for the upper end of each ratio's interval."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A short run of a benchmark, and by name the path of each median in its result: keys, outermost first."""

    arguments: tuple[str, ...]
    medians: dict[str, tuple[str, ...]]


OURS: Final = ("ours", "median")
BENCHMARKS: Final = {
    "start_latency": Benchmark(("--pairs", "5", "--cold", "0", "--peers", ""), {"start": OURS}),
    "recovery": Benchmark(("--pairs", "3", "--peers", ""), {"recovery": OURS}),
    "cli": Benchmark(("--pairs", "10", "--ups", "1"), {"status": OURS, "submit": ("submit", "median")}),
    "exporter_cost": Benchmark(
        ("--pairs", "1", "--hang-seconds", "1"),
        {"scrape": OURS, "processor": ("cpu_percent_per_gpu", "ours", "median")},
    ),
    "checkpoint_stall": Benchmark(
        ("--pairs", "4", "--sizes", "54K,7M"),
        {"54K": ("sizes", "54K", *OURS), "7M": ("sizes", "7M", *OURS)},
    ),
    "trainer_overhead": Benchmark(("--pairs", "4", "--steps", "60"), {"step": OURS}),
}


def main() -> None:
    """Measure and report."""
    options = parser(str(__doc__).partition("\n")[0], pairs=8)
    options.add_argument("other", type=Path, help="the checkout of the other commit, with its .venv")
    options.add_argument("--benchmarks", default=",".join(BENCHMARKS), help="which of " + ", ".join(BENCHMARKS))
    arguments = options.parse_args()
    sides = {"before": arguments.other.resolve(), "after": HERE}
    found = {name: _compare(name, sides, arguments.pairs) for name in arguments.benchmarks.split(",") if name}
    result = {
        "measure": "before_after",
        "better": "lower",
        "most": MOST,
        "benchmarks": found,
        "machine": machine(),
        "before": commit(sides["before"]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    report(result, arguments.json)


def _compare(name: str, sides: dict[str, Path], pairs: int) -> dict[str, Any]:
    benchmark, failures = BENCHMARKS[name], list[str]()
    values: dict[str, dict[str, list[float]]] = {median: {side: [] for side in sides} for median in benchmark.medians}
    for number in range(pairs):
        for side in sides if number % 2 == 0 else reversed(sides):
            try:
                found = _run(name, sides[side])
            except subprocess.CalledProcessError as error:
                failures.append(f"{side}: exit status {error.returncode}")
                print(f"round {number}: {name} {side} failed: {error.stderr[-500:]}", file=sys.stderr)
                continue
            for median, value in found.items():
                values[median][side].append(value)
                print(f"round {number}: {name} {median} {side} {value:.5f}", file=sys.stderr)
    return {"failures": failures} | {
        median: {
            **{side: summary(numbers[side]) for side in sides},
            "ratio": ratio(numbers["after"], numbers["before"]),
        }
        for median, numbers in values.items()
        if all(numbers.values())
    }


def _run(name: str, checkout: Path) -> dict[str, float]:
    """Run the benchmark of a checkout in a process of its own; return its medians."""
    benchmark = BENCHMARKS[name]
    command = [str(checkout / ".venv" / "bin" / "python"), "-m", f"benchmarks.{name}", *benchmark.arguments]
    ran = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    result, found = json.loads(ran.stdout), dict[str, float]()
    for median, keys in benchmark.medians.items():
        value: Any = result
        for key in keys:
            value = value[key]
        found[median] = float(value)
    return found


if __name__ == "__main__":
    main()
