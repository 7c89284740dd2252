"""Traces of jobs and their simulation by several policies: published ones as CSV (Philly, Helios, Alibaba PAI), and synthetic ones, the same for the same seed.

Each row of a file is validated; the first bad one is an error with its line. Of the synthetic families, ``philly`` has the sizes and, for
each class of size, the quantiles of durations of the 82,247 jobs of the published Philly trace (Jeon et al., USENIX ATC 2019, in the cleaned
form of Sia's artifacts, SOSP 2023). The others vary one property each, to show what a policy depends on: ``bursty`` its arrivals, ``large``
its sizes, ``exponential`` its durations.
"""

from __future__ import annotations

import csv
import random
import re
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil, exp, fsum, isfinite, log
from typing import TYPE_CHECKING, Final

import numpy as np

from orchestrator.analysis.plots import colour, dash, finish, new_figure, save, time_axis
from orchestrator.core.cluster import Node
from orchestrator.core.job.record import MAX_WORKERS
from orchestrator.core.simulation import CHECKPOINT_SECONDS, POLICIES, Figures, Simulation, TraceJob, figures_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from orchestrator.core.simulation import Outcome


class TraceError(Exception):
    """The trace cannot be used; the message names the file, the line and the value, and ``hint`` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The columns of a published trace. ``users``: the first existing one of these names a job's user."""

    name: str
    at: str
    seconds: str
    gpus: str
    ranks: str = ""
    users: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        """The required columns."""
        return tuple(column for column in (self.at, self.seconds, self.gpus, self.ranks) if column)


FORMATS: Final = (
    Format(name="Philly", at="timestamp", seconds="duration", gpus="num_gpus", users=("user", "cluster")),
    Format(name="Helios", at="submit_time", seconds="duration", gpus="gpu_num", users=("user", "vc")),
    Format(name="Alibaba PAI", at="submit_time", seconds="duration", gpus="num_gpu", ranks="num_inst", users=("user",)),
)


def read_trace(path: Path) -> list[TraceJob]:
    """Return the jobs of a trace that use GPUs, in order of submission. Raises TraceError, and OSError."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            jobs = list(_jobs(str(path), csv.DictReader(file)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise TraceError(f"{path} is not CSV: {error}", "name a CSV file with a line of column names") from error
    if not jobs:
        raise TraceError(f"{path} holds no job that uses a GPU", "name a trace with at least one")
    return sorted(jobs, key=lambda job: job.at)


def _jobs(path: str, rows: csv.DictReader[str]) -> Iterator[TraceJob]:
    known = _format(path, rows.fieldnames or ())
    for row in rows:
        try:
            job = _job(known, row)
        except ValueError as error:
            raise TraceError(f"{path}, line {rows.line_num}: {error}", "fix or remove the line") from error
        if job is not None:
            yield job


def _format(path: str, columns: Iterable[str]) -> Format:
    there = set(columns)
    for known in FORMATS:
        if there.issuperset(known.required):
            return known
    wanted = "; ".join(f"{known.name}: {', '.join(known.required)}" for known in FORMATS)
    raise TraceError(
        f"{path} has the columns {', '.join(sorted(there)) or 'of no header'}", f"one of these is needed: {wanted}"
    )


def _job(known: Format, row: Mapping[str, str | None]) -> TraceJob | None:
    """Return the job of a row; None for one without GPUs."""
    gpus = _number(row, known.gpus, empty=0.0 if known.ranks else None)
    ranks = _number(row, known.ranks, empty=1.0) if known.ranks else 1.0
    if gpus == 0:
        return None
    if gpus != int(gpus) and gpus > 1:
        gpus = float(ceil(gpus))
    if not known.ranks and gpus >= 1:
        ranks, gpus = gpus, 1.0
    if ranks != int(ranks) or not 1 <= ranks <= MAX_WORKERS:
        raise ValueError(f"{known.ranks or known.gpus} is {ranks:g}: a whole number from 1 to {MAX_WORKERS} is needed")
    user = next((value for column in known.users if (value := row.get(column))), "")
    priority = _number(row, "priority", empty=50.0)
    if priority != int(priority) or priority > 100:
        raise ValueError(f"priority is {priority:g}: a whole number from 0 to 100 is needed")
    seconds = max(1.0, _number(row, known.seconds))
    return TraceJob(
        at=_time(row, known.at), seconds=seconds, ranks=int(ranks), gpus=gpus, user=user, priority=int(priority)
    )


def _number(row: Mapping[str, str | None], column: str, *, empty: float | None = None) -> float:
    text = (row.get(column) or "").strip()
    if not text and empty is not None:
        return empty
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value < 0:
        raise ValueError(f"{column} is {text!r}: a number from 0 on is needed")
    return value


def _time(row: Mapping[str, str | None], column: str) -> float:
    """Return seconds since the epoch, or since any other time, which a trace may give as a number."""
    text = (row.get(column) or "").strip()
    try:
        return float(text) if text.replace(".", "", 1).isdigit() else _parsed(text).timestamp()
    except ValueError as error:
        raise ValueError(f"{column} is {text!r}: seconds or a date like 2017-10-09 07:01:55 are needed") from error


def _parsed(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


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


MAX_NODES: Final = 100_000
_PLENTY: Final = 1e9
"""CPUs and memory of a simulated node: a trace does not contain its jobs' needs of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Outcome and figures of one policy."""

    policy: str
    outcome: Outcome
    figures: Figures


def parse_nodes(text: str) -> dict[str, Node]:
    """Return nodes for ``64x8`` (64 of 8 GPUs), or several kinds as ``64x8,4x16``. Raises ValueError."""
    sizes: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})x(\d{1,3})\s*", part)
        if found is None or int(found[1]) < 1 or int(found[2]) < 1:
            raise ValueError(f"{part!r} is not a number of nodes: write 64x8 for 64 nodes of 8 GPUs, or 64x8,4x16")
        sizes += [int(found[2])] * int(found[1])
    if len(sizes) > MAX_NODES:
        raise ValueError(f"{len(sizes)} nodes are too many: at most {MAX_NODES}")
    names = [f"node-{number:06}" for number in range(1, len(sizes) + 1)]
    return {
        name: Node(id=name, name=name, gpus=gpus, cpus=_PLENTY, memory_bytes=2**62)
        for name, gpus in zip(names, sizes, strict=True)
    }


def parse_policies(text: str) -> list[str]:
    """Return the names of policies, each once. Raises ValueError."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"unknown policy {name!r}; one of: {', '.join(POLICIES)}")
    return names


def compare(
    trace: Sequence[TraceJob],
    nodes: dict[str, Node],
    policies: Iterable[str],
    *,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> list[Result]:
    """Run the trace under each policy."""
    results = []
    for name in policies:
        outcome = Simulation(trace, nodes, name, checkpoint_seconds=checkpoint_seconds).run()
        results.append(Result(policy=name, outcome=outcome, figures=figures_of(outcome)))
    return results


def write_picture(results: Sequence[Result], target: Path) -> Path:
    """Draw three panels with a line for each policy. Raises PlotError without matplotlib, and OSError."""
    figure = new_figure(11, 9)
    waits, busy, queued = figure.subplots(3, 1)
    start = min((r.outcome.samples[0][0] for r in results if r.outcome.samples), default=0.0)
    end = max((r.outcome.samples[-1][0] for r in results if r.outcome.samples), default=0.0)
    axis = time_axis(start, end - start)
    for place, result in enumerate(results):
        look = {"color": colour(place), "linestyle": dash(place), "label": result.policy}
        ordered = np.sort(np.array([one.wait for one in result.outcome.ran])) / 3600
        waits.plot(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), **look)
        samples = np.array(result.outcome.samples, dtype=float).reshape(-1, 3)
        times = axis.of(samples[:, 0])
        busy.plot(times, samples[:, 1], **look)
        queued.plot(times, samples[:, 2], **look)
    waits.set_xscale("symlog", linthresh=0.01)
    finish(waits, y="share of jobs", x="wait (h)")
    finish(busy, y="busy GPUs")
    finish(queued, y="waiting jobs", x=axis.label)
    handles, labels = waits.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize="small", frameon=False)
    return save(figure, target)
