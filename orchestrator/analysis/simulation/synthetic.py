"""Synthetic traces of any size and load, the same for the same seed.

``philly`` has the sizes and, for each class of size, the quantiles of durations of the 82,247 jobs of the published Philly trace
(Jeon et al., USENIX ATC 2019, in the cleaned form of Sia's artifacts, SOSP 2023). The other families vary one property
each, to show what a policy depends on: ``bursty`` its arrivals, ``large`` its sizes, ``exponential`` its durations.
"""

from __future__ import annotations

import csv
import random
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime
from math import exp, fsum, log
from typing import TYPE_CHECKING, Final

from orchestrator.core.simulation import TraceJob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_SHARES: Final = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_QUANTILES: Final = (
    (1, (1, 52, 62, 76, 215, 600, 1117, 1728, 2464, 3754, 8512, 19137, 135404, 3256045)),
    (4, (2, 11, 15, 19, 25, 85, 367, 5581, 25432, 79264, 166199, 233725, 748678, 2750674)),
    (8, (1, 125, 216, 783, 3940, 12390, 23683, 64753, 140815, 203140, 352409, 525631, 1066894, 4628226)),
    (10_000, (1, 35, 69, 345, 880, 3165, 21137, 53862, 73728, 159985, 252560, 446126, 1152387, 1710643)),
)
"""Durations in seconds at ``_SHARES``, for jobs of at most this many GPUs."""
_SIZES: Final = {1: 0.9317, 2: 0.0221, 4: 0.0227, 8: 0.02, 16: 0.0024, 32: 0.0008, 64: 0.0001}
_LARGE_SIZES: Final = {1: 0.4, 2: 0.15, 4: 0.15, 8: 0.2, 16: 0.06, 32: 0.03, 64: 0.01}
_MEAN_SECONDS: Final = 3600.0
_USERS: Final = 16
_BURST: Final = 20
_START: Final = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of trace: shares of sizes, whether durations are exponential, and whether jobs arrive in bursts."""

    sizes: Mapping[int, float]
    exponential: bool = False
    bursty: bool = False


FAMILIES: Final = {
    "philly": Family(sizes=_SIZES),
    "bursty": Family(sizes=_SIZES, bursty=True),
    "large": Family(sizes=_LARGE_SIZES),
    "exponential": Family(sizes=_SIZES, exponential=True),
}


def synthetic_trace(family: str, *, jobs: int, gpus: float, load: float, seed: int) -> list[TraceJob]:
    """Return jobs that request the share ``load`` of ``gpus`` GPUs while they arrive, without jobs of more GPUs."""
    kind = FAMILIES[family]
    choose = random.Random(seed)  # noqa: S311  # a trace, no secret
    sizes = [size for size in kind.sizes if size <= gpus] or [1]
    picked = choose.choices(sizes, [kind.sizes[size] for size in sizes], k=jobs)
    seconds = [choose.expovariate(1 / _MEAN_SECONDS) if kind.exponential else _duration(choose, n) for n in picked]
    span = fsum(n * length for n, length in zip(picked, seconds, strict=True)) / (load * gpus)
    arrivals = _bursts(choose, jobs, span) if kind.bursty else sorted(choose.uniform(0, span) for _ in range(jobs))
    return [
        TraceJob(at=_START + round(at, 3), seconds=max(1.0, round(length, 3)), ranks=n, user=_user(choose))
        for at, length, n in zip(arrivals, seconds, picked, strict=True)
    ]


def write_trace(jobs: Sequence[TraceJob], path: Path) -> None:
    """Write jobs in Philly's form. Raises OSError."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("timestamp", "duration", "num_gpus", "gpu_time", "cluster", "priority"))
        for job in jobs:
            at = datetime.fromtimestamp(job.at, UTC).replace(tzinfo=None).isoformat(" ", "milliseconds")
            time = round(job.seconds * job.all_gpus, 3)
            rows.writerow((at, job.seconds, f"{job.all_gpus:g}", time, job.user, job.priority))


def _duration(choose: random.Random, size: int) -> float:
    """Draw a duration from the quantiles: logarithms are interpolated."""
    values = next(found for most, found in _QUANTILES if size <= most)
    share = choose.random()
    above = min(bisect_right(_SHARES, share), len(_SHARES) - 1)
    low, high = _SHARES[above - 1], _SHARES[above]
    part = (share - low) / (high - low)
    return exp(log(values[above - 1]) * (1 - part) + log(values[above]) * part)


def _bursts(choose: random.Random, jobs: int, span: float) -> list[float]:
    """Return times in groups of about twenty within a minute."""
    starts = [choose.uniform(0, span) for _ in range(-(-jobs // _BURST))]
    return sorted(choose.choice(starts) + choose.uniform(0, 60) for _ in range(jobs))


def _user(choose: random.Random) -> str:
    """Draw a user: a few users submit most of the jobs."""
    return f"user-{min(int(choose.paretovariate(1.0)), _USERS)}"
