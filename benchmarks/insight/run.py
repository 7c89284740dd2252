"""Which finding each fault leads to, how soon, and what is found on healthy jobs: the confusion matrix of diagnosis.

Runs the production diagnosis (``core/diagnosis``) on traces: every fault of ``faults.py`` in five forms, every job of
``healthy.py``, each with noise from several seeds. It takes minutes and no daemon. ``python -m benchmarks.insight.run --write`` stores the result beside the other
ones and puts the matrix into docs/diagnosis.md; without it, the result is printed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import re
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.insight.faults import FAULT_AT, Case, cases
from benchmarks.insight.healthy import HEALTHY, SECONDS
from benchmarks.insight.traces import JobModel, diagnose

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "diagnosis.md"
MARKS = re.compile(r"(<!-- insight:begin -->\n)(.*?)(<!-- insight:end -->)", re.DOTALL)
LIMIT_SECONDS = 60.0
HEALTHY_SECONDS = 1200.0
FAULT_SEEDS, HEALTHY_SEEDS = 3, 5


FORMS_IN_ALL = sum(1 for _ in cases())


def with_seed(case: Case, seed: int) -> Case:
    """The case with other noise; ``cases`` made it for this use alone."""
    case.job.random = random.Random(f"{case.job.seed}-{seed}")
    return case


def judge(case: Case) -> dict[str, Any]:
    """What the first finding after the fault is, and whether it is the right one, in time."""
    events = [(FAULT_AT, case.change)] if case.change is not None else []
    opened = diagnose(case.job, FAULT_AT + 240.0 + 20.0 * case.slowest + case.patience, events=events)
    early = [one for one in opened if one.at < FAULT_AT]
    first = next((one for one in opened if one.at >= FAULT_AT), None)
    right = first is not None and (first.finding.kind, first.finding.rank) == (case.kind, case.rank)
    right = right and first is not None and (not case.node or first.finding.node == case.node)
    seconds = None if first is None else first.at - FAULT_AT
    return {
        "fault": case.fault,
        "form": case.form,
        "wanted": [case.kind, case.rank],
        "found": None if first is None else [first.finding.kind, first.finding.rank],
        "others": [one.finding.kind for one in opened if one is not first],
        "seconds": seconds,
        "right": right and not early,
        "in_time": right
        and not early
        and seconds is not None
        and seconds <= LIMIT_SECONDS + case.slowest + case.patience,
    }


def healthy(seed: int) -> dict[str, list[str]]:
    """What is found on each kind of healthy job with this seed."""
    found = {}
    for name, values in HEALTHY.items():
        job = JobModel(**{**values, "seed": 1000 + seed})
        opened = diagnose(job, SECONDS.get(name, max(HEALTHY_SECONDS, 40.0 * job.step_seconds)))
        found[name] = [f"{one.finding.kind} at {one.at:g} s, seed {seed}" for one in opened]
    return found


def faulty(seed: int) -> list[dict[str, Any]]:
    """What is found of each fault with this seed."""
    return [judge(with_seed(case, seed)) for case in cases()]


def measure(fault_seeds: int, healthy_seeds: int) -> dict[str, Any]:
    """Everything, as JSON-ready values."""
    with ProcessPoolExecutor(max_workers=2) as pool:
        rounds = pool.map(faulty, range(fault_seeds))
        calm = list(pool.map(healthy, range(healthy_seeds)))
        results = [one for each in rounds for one in each]
    sound = {name: [one for each in calm for one in each[name]] for name in HEALTHY}
    return {
        "measure": "insight",
        "faults": results,
        "right": sum(one["right"] for one in results),
        "in_time": sum(one["in_time"] for one in results),
        "cases": len(results),
        "healthy": {
            "kinds": len(sound),
            "runs": healthy_seeds * len(sound),
            "false": {k: v for k, v in sound.items() if v},
        },
    }


def matrix(results: Sequence[dict[str, Any]]) -> str:
    """One row for each fault: what was found, how often, and how soon."""
    rows = [
        "| fault | forms | named rightly | within 60 s | found instead | median time |",
        "|---|---|---|---|---|---|",
    ]
    by_fault: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in results:
        by_fault[one["fault"]].append(one)
    for fault, each in by_fault.items():
        wrong = Counter(_told(one["found"]) for one in each if not one["right"])
        instead = ", ".join(f"{kind} ({count})" for kind, count in sorted(wrong.items())) or "–"
        times = [one["seconds"] for one in each if one["right"]]
        took = f"{median(times):.0f} s" if times else "–"
        right, soon = sum(one["right"] for one in each), sum(one["in_time"] for one in each)
        rows.append(f"| {fault} | {len(each)} | {right} | {soon} | {instead} | {took} |")
    return "\n".join(rows) + "\n"


def _told(found: list[Any] | None) -> str:
    return "nothing" if found is None else f"`{found[0]}`" + ("" if found[1] is None else f" of rank {found[1]}")


def section(result: dict[str, Any]) -> str:
    """What docs/diagnosis.md shows."""
    sound = result["healthy"]
    false = sum(len(found) for found in sound["false"].values())
    return (
        f"{result['right']} of {result['cases']} cases {_seeds(result)}are named rightly (kind and rank, nothing before), {result['in_time']} of them within"
        f" 60 s or a step longer. {sound['kinds']} kinds of healthy jobs, {sound['runs']} runs of up to twenty minutes: {false} findings.\n\n"
        + matrix(result["faults"])
    )


def _seeds(result: dict[str, Any]) -> str:
    """How many seeds each form had, where they were several."""
    seeds = result["cases"] // FORMS_IN_ALL
    return f"(each form with {seeds} seeds) " if seeds > 1 else ""


def main() -> None:
    """Measure, and print or store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the result and update docs/diagnosis.md")
    parser.add_argument("--fault-seeds", type=int, default=FAULT_SEEDS)
    parser.add_argument("--healthy-seeds", type=int, default=HEALTHY_SEEDS)
    options = parser.parse_args()
    result = measure(options.fault_seeds, options.healthy_seeds)
    if options.write:
        today = dt.datetime.now(tz=dt.UTC).date()
        path = ROOT / "benchmarks" / "results" / f"{today}-insight.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(MARKS.sub(lambda m: m[1] + section(result) + m[3], text), encoding="utf-8")
    print(section(result))
    print(json.dumps(result["healthy"]["false"], indent=1))


if __name__ == "__main__":
    main()
