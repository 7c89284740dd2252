"""Resources held after each round of disturbances, and the result of one call and of all."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil

from benchmarks import measure
from orchestrator.runtime.nodes.directories import namespace, page_directory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.disturbances.disturber import Found
    from benchmarks.disturbances.places import Place

WARMING_ROUNDS: Final = 1
"""The first round starts processes that later rounds use again."""
CALLED: Final = {"node": "", "gpu": ", on a GPU", "cluster": ", 3 nodes"}
"""Suffix of a kind of disturbance, by the kind of place."""
LEAST_APART: Final = 50
"""Fewest recoveries between two rounds that are compared: a slope over fewer, as after the last round of a sitting, says nothing."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Resources that a place held at rest, after this number of recoveries."""

    recoveries: int
    held: Mapping[str, float]


def at_rest(place: Place) -> dict[str, float]:
    """Return the resources that orch and Ray hold now: processes, their memory (shared pages by share) and open files, and bytes where they write."""
    held: Counter[str] = Counter()
    for process in place.processes():
        with contextlib.suppress(psutil.Error):
            held["memory_bytes"] += process.memory_full_info().pss
            held["open_files"] += process.num_fds()
            held["processes"] += 1
    held["shm_bytes"] = _bytes_below(page_directory(namespace(place.stack.home)))
    held["tmp_bytes"] = _bytes_below(place.stack.node_root)
    held["home_bytes"] = _bytes_below(place.stack.home)
    return {**held, **place.held_elsewhere()}


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(root) / name).lstat().st_blocks * 512
    return total


def growth(rests: Sequence[Rest]) -> dict[str, float] | None:
    """Return the growth of each resource per thousand recoveries: the median of the slopes between any two rounds after the warming one.

    None where no two of them are ``LEAST_APART``.
    """
    later = itertools.combinations(rests[WARMING_ROUNDS:], 2)
    pairs = [(a, b) for a, b in later if b.recoveries - a.recoveries >= LEAST_APART]
    if not pairs:
        return None

    def slope(name: str) -> float:
        return statistics.median(
            (b.held.get(name, 0) - a.held.get(name, 0)) / (b.recoveries - a.recoveries) * 1000 for a, b in pairs
        )

    return {name: round(slope(name), 1) for name in pairs[0][0].held}


def sitting(found: Found, rests: Sequence[Rest], seconds: float, seed: int, place: str, beside: int) -> dict[str, Any]:
    """Return one place's part of the result, with ``beside`` other places disturbed on the machine at the same time."""
    return {
        "place": place,
        "beside": beside,
        "recoveries": found.recoveries,
        "passed_over": found.passed_over,
        "problems": found.problems,
        "by_disturbance": dict(found.disturbances.most_common()),
        "seconds_of": {name: [round(one, 2) for one in times] for name, times in sorted(found.seconds.items())},
        "growth_per_thousand": growth(rests),
        "rounds": [{"recoveries": rest.recoveries, **rest.held} for rest in rests],
        "seconds": round(seconds, 1),
        "seed": seed,
        "machine": measure.machine(),
        "commit": measure.commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def whole(sittings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of all calls; its machine is that of the last."""
    problems = [problem for each in sittings for problem in each["problems"]]
    recoveries = sum(each["recoveries"] for each in sittings)
    kinds: Counter[str] = sum((Counter(each["by_disturbance"]) for each in sittings), Counter())
    return {
        "measure": "disturbances",
        "unit": "promises broken",
        "better": "lower",
        "ours": {
            "median": len(problems),
            "n": recoveries,
            "passed_over": sum(each["passed_over"] for each in sittings),
        },
        "peers": {},
        "ratio": {},
        "target": "none",
        "met": not problems and recoveries > 0,
        "by_disturbance": dict(kinds.most_common()),
        "recovery_seconds": recovery_seconds(sittings),
        "sittings": list(sittings),
        **{key: sittings[-1][key] for key in ("machine", "commit", "date")},
    }


def recovery_seconds(sittings: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the durations of recoveries, by the kinds of place and disturbance; all pairs are one kind."""
    times: dict[str, list[float]] = defaultdict(list)
    for each in sittings:
        for name, seconds in each["seconds_of"].items():
            kind = "two at once" if " and " in name else name
            times[f"{kind}{CALLED[each['place']]}"] += seconds
    return {name: _told(seconds) for name, seconds in sorted(times.items())}


def _told(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(float(np.median(seconds)), 2),
        "p99": round(float(np.percentile(seconds, 99)), 2),
        "max": max(seconds),
        "n": len(seconds),
    }
