"""Measures the confusion matrix of diagnosis: the finding and delay for each fault, and the findings on healthy jobs.

Runs the production diagnosis (``core/diagnosis``) on traces: every fault of ``faults.py`` in five forms, every job of
``healthy.py``, each with noise from several seeds, and a month of healthy jobs; then the real alert on the findings (``alerts.py``). No daemon.
``python -m benchmarks.insight.run --write`` stores the result beside the other ones and writes the matrix into docs/diagnosis.md; without it, the
result is printed. It takes twenty minutes of processor time: with ``--keep FILE`` each trace's result is kept there, and the next call
continues with the rest; ``--seconds N`` ends a call after about that time. The month comes last, and the result counts the part of it that is done.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import kept
from benchmarks.insight import alerts
from benchmarks.insight.faults import FAULT_AT, Case, cases
from benchmarks.insight.healthy import HEALTHY, SECONDS
from benchmarks.insight.traces import JobModel, diagnose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "diagnosis.md"
MARKS = re.compile(r"(<!-- insight:begin -->\n)(.*?)(<!-- insight:end -->)", re.DOTALL)
LIMIT_SECONDS = 60.0
HEALTHY_SECONDS = 1200.0
MONTH_SECONDS = 30 * 86400.0
"""Total of all kinds of healthy jobs, each of which runs for an equal part of it."""
FAULT_SEEDS, HEALTHY_SEEDS = 3, 5


FORMS_IN_ALL = sum(1 for _ in cases())


def with_seed(case: Case, seed: int) -> Case:
    """Return the case with other noise; ``cases`` made it for this use alone."""
    case.job.random = random.Random(f"{case.job.seed}-{seed}")
    return case


def judge(case: Case) -> dict[str, Any]:
    """Return the first finding after the fault, and whether it is the right one, in time."""
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
        "subject": None if first is None else [first.finding.gpu_uuid, first.finding.node],
        "patience": case.slowest + case.patience,
        "others": [one.finding.kind for one in opened if one is not first],
        "seconds": seconds,
        "right": right and not early,
        "in_time": right
        and not early
        and seconds is not None
        and seconds <= LIMIT_SECONDS + case.slowest + case.patience,
    }


def healthy(name: str, seed: int, seconds: float) -> list[str]:
    """Return the findings on a healthy job that runs for this long, or on several in turn where each is short."""
    values, found, left, part = HEALTHY[name], [], seconds, 0
    while left > 0.0:
        job = JobModel(**{**values, "seed": 1000 + seed + 7919 * part})
        length = min(left, SECONDS.get(name, left))
        found += [f"{one.finding.kind} at {one.at:g} s, seed {seed}" for one in diagnose(job, length)]
        left, part = left - length, part + 1
    return found


@dataclass(frozen=True, slots=True)
class Unit:
    """One trace: ``what`` is fault, healthy or month."""

    what: str
    name: str
    seed: int

    @property
    def key(self) -> str:
        """Name of the trace in the file of kept results."""
        return f"{self.what}/{self.name}/{self.seed}"

    def run(self) -> Any:
        """Run the trace; return its result as JSON-ready values."""
        if self.what == "fault":
            return judge(with_seed(list(cases())[int(self.name)], self.seed))
        if self.what == "month":
            return healthy(self.name, self.seed, MONTH_SECONDS / len(HEALTHY))
        values = HEALTHY[self.name]
        longest = max(HEALTHY_SECONDS, 40.0 * JobModel(**values).step_seconds)
        return healthy(self.name, self.seed, SECONDS.get(self.name, longest))


def units(fault_seeds: int, healthy_seeds: int) -> list[Unit]:
    """Return all traces, the month last."""
    faults = [Unit("fault", str(number), seed) for seed in range(fault_seeds) for number in range(FORMS_IN_ALL)]
    sound = [Unit("healthy", name, seed) for seed in range(healthy_seeds) for name in HEALTHY]
    return [*faults, *sound, *(Unit("month", name, 77) for name in HEALTHY)]


def work(wanted: Sequence[Unit], keep: Path | None, seconds: float) -> dict[str, Any]:
    """Return the results of the units, as far as the time allows."""
    return kept.results({unit.key: unit.run for unit in wanted}, keep, seconds)


def summary(wanted: Sequence[Unit], done: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole result as JSON-ready values. Raises RuntimeError without promtool."""
    of = {
        what: [(unit, done[unit.key]) for unit in wanted if unit.what == what and unit.key in done]
        for what in ("fault", "healthy", "month")
    }
    results = [one for _, one in of["fault"]]
    sound: dict[str, list[str]] = {name: [] for name in HEALTHY}
    for unit, found in of["healthy"]:
        sound[unit.name] += found
    return {
        "measure": "insight",
        "faults": results,
        "right": sum(one["right"] for one in results),
        "in_time": sum(one["in_time"] for one in results),
        "cases": len(results),
        "alerts": alert_times(results),
        "healthy": {
            "kinds": len(sound),
            "runs": len(of["healthy"]),
            "false": {name: found for name, found in sound.items() if found},
        },
        "month": {
            "kinds": len(of["month"]),
            "hours": round(len(of["month"]) / len(HEALTHY) * MONTH_SECONDS / 3600.0),
            "false": {unit.name: found for unit, found in of["month"] if found},
        },
    }


def alert_times(results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count the right findings for which the alert fires as it must, and those for which it fires in time."""
    right = [one for one in results if one["right"]]
    opened = []
    for number, one in enumerate(right):
        kind, rank = one["found"]
        uuid, node = one["subject"]
        labels = {"kind": kind, "job_id": f"job-{number}", "rank": "" if rank is None else str(rank)}
        opened.append({"labels": labels | {"gpu_uuid": uuid, "node": node}, "at": FAULT_AT + one["seconds"]})
    limit = LIMIT_SECONDS + alerts.LATEST_SECONDS
    soon = sum(
        alerts.fired_at(two["at"]) - FAULT_AT <= limit + one["patience"] for one, two in zip(right, opened, strict=True)
    )
    return {"fired": alerts.check(opened), "in_time": soon, "seconds": alerts.LATEST_SECONDS}


def matrix(results: Sequence[dict[str, Any]]) -> str:
    """Return one row for each fault: what was found, how often, and how soon."""
    rows = [
        "| fault | forms | named rightly | within 60 s | found instead | median time |",
        "|---|---|---|---|---|---|",
    ]
    by_fault: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in results:
        by_fault[one["fault"]].append(one)
    for fault, each in by_fault.items():
        wrong = Counter(_finding_text(one["found"]) for one in each if not one["right"])
        instead = ", ".join(f"{kind} ({count})" for kind, count in sorted(wrong.items())) or "–"
        times = [one["seconds"] for one in each if one["right"]]
        took = f"{median(times):.0f} s" if times else "–"
        right, soon = sum(one["right"] for one in each), sum(one["in_time"] for one in each)
        rows.append(f"| {fault} | {len(each)} | {right} | {soon} | {instead} | {took} |")
    return "\n".join(rows) + "\n"


def _finding_text(found: list[Any] | None) -> str:
    return "nothing" if found is None else f"`{found[0]}`" + ("" if found[1] is None else f" of rank {found[1]}")


def section(result: dict[str, Any]) -> str:
    """Return the text that docs/diagnosis.md shows. Results of earlier versions have neither a month nor alerts."""
    sound, month, alert_counts = result["healthy"], result.get("month"), result.get("alerts")
    text = (
        f"{result['right']} of {result['cases']} cases {_seeds(result)}are named rightly (kind and rank, nothing before), {result['in_time']} of them within"
        f" 60 s or a step longer. {sound['kinds']} kinds of healthy jobs, {sound['runs']} runs of up to twenty minutes: {_count(sound)} findings."
    )
    if month is not None:
        text += f" {month['kinds']} of these kinds for {month['hours']} job hours together, each without a break: {_count(month)} findings."
    if alert_counts is not None:
        text += (
            f"\n\nThe alert OrchFinding, with rank and GPU in its labels, fires as it must for {alert_counts['fired']} of {result['right']} findings (promtool, with the"
            f" generated rule), for {alert_counts['in_time']} of them within the same time and {alert_counts['seconds']} s: a scrape, and its `for`."
        )
    return text + "\n\n" + matrix(result["faults"])


def _count(runs: Mapping[str, Any]) -> int:
    return sum(len(found) for found in runs["false"].values())


def _seeds(result: dict[str, Any]) -> str:
    """Return a text with the number of seeds of each form; empty where it is 1."""
    seeds = result["cases"] // FORMS_IN_ALL
    return f"(each form with {seeds} seeds) " if seeds > 1 else ""


def main() -> None:
    """Measure, and print or store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the result and update docs/diagnosis.md")
    parser.add_argument("--fault-seeds", type=int, default=FAULT_SEEDS)
    parser.add_argument("--healthy-seeds", type=int, default=HEALTHY_SEEDS)
    parser.add_argument("--keep", type=Path, help="file of results; a later call continues with the rest")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further trace after this time")
    options = parser.parse_args()
    wanted = units(options.fault_seeds, options.healthy_seeds)
    done = work(wanted, options.keep, options.seconds)
    print(f"{len(done)} of {len(wanted)} traces", flush=True)
    if any(unit.key not in done for unit in wanted if unit.what != "month"):
        return
    result = summary(wanted, done)
    if options.write:
        today = dt.datetime.now(tz=dt.UTC).date()
        path = ROOT / "benchmarks" / "results" / f"{today}-insight.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(MARKS.sub(lambda m: m[1] + section(result) + m[3], text), encoding="utf-8")
    print(section(result))
    print(json.dumps({name: result[name]["false"] for name in ("healthy", "month")}, indent=1))


if __name__ == "__main__":
    main()
