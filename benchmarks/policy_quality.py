"""Measures the order of the queue: the daemon's scheduler, as it is by default, against FIFO and a clairvoyant bound, in simulated time.

``python -m benchmarks.policy_quality [--trace philly.csv] [--jobs N] [--nodes 64x8] [--pairs SEEDS] [--json FILE]``. For each
family of synthetic traces at load 0.9, and for a cut of a trace on as many nodes as give that load, each seed gives ratios of mean
completion times and of the 99th percentile of waits. No job declares a duration, and the durations of like jobs are unknown. The bound is
shortest remaining time first, which no scheduler can reach: durations are known, preemption is free, and GPUs have no nodes. Jobs save every 30 minutes.

It takes long at its default sizes. With ``--keep FILE`` the ratios of each trace are kept there, and the next call continues with the rest;
``--seconds N`` ends a call after about that time, with the result so far: every family's first seed comes first.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from heapq import merge
from math import ceil, fsum, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import kept
from benchmarks.measure import parser, report, result, summary
from orchestrator.analysis.simulation import FAMILIES, compare, parse_nodes, read_trace, synthetic_trace
from orchestrator.core.simulation import Outcome, Ran, Usage, figures_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core.simulation import TraceJob

LOAD: Final = 0.9
GPUS_A_NODE: Final = 8
CUT: Final = "trace"
TARGETS: Final = {"mean_over_bound": 1.10, "mean_over_bound_large": 3.0, "p99_wait_over_fifo": 1.0}
_EPSILON: Final = 1e-6


def main() -> None:
    """Measure each family, and the trace."""
    made = parser("completion times of the daemon's scheduler against FIFO's and a bound", 5)
    made.add_argument("--trace", type=Path, help="a trace to play too, as orch simulate reads it")
    made.add_argument("--jobs", type=int, default=20_000, help="of a synthetic trace, and of each cut of the trace")
    made.add_argument("--nodes", default="64x8", help="of synthetic traces")
    made.add_argument("--keep", type=Path, help="file of results; a later call continues with the rest")
    made.add_argument("--seconds", type=float, default=inf, help="begin no further trace after this time")
    options = made.parse_args()
    trace = read_trace(options.trace) if options.trace else []
    found = measure(options.jobs, options.nodes, options.pairs, trace, keep=options.keep, seconds=options.seconds)
    report(found, options.json)


def measure(
    jobs: int,
    nodes: str,
    seeds: int,
    trace: Sequence[TraceJob] = (),
    *,
    keep: Path | None = None,
    seconds: float = inf,
) -> dict[str, Any]:
    """Return the ratios, by family; ``ours`` is the mean over the bound's, of all synthetic traces. Raises ValueError where none is done in time."""
    gpus = sum(node.gpus for node in parse_nodes(nodes).values())
    cut = cuts(trace, jobs, seeds) if trace else []

    def synthetic(family: str, seed: int) -> dict[str, float]:
        return ratios(synthetic_trace(family, jobs=jobs, gpus=gpus, load=LOAD, seed=seed), nodes)

    parts: dict[str, Callable[[], dict[str, float]]] = {}
    for seed in range(seeds):
        for family in FAMILIES:
            parts[f"{family}/{seed}/{jobs}/{nodes}"] = partial(synthetic, family, seed)
        if seed < len(cut):
            parts[f"{CUT}/{seed}/{jobs}/{len(trace)}"] = partial(ratios, cut[seed], nodes_for(cut[seed]))
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for key, one in kept.results(parts, keep, seconds).items():
        found[key.partition("/")[0]].append(one)
    every = [one["mean_over_bound"] for family, many in found.items() if family != CUT for one in many]
    if not every:
        raise ValueError(f"no trace was done within {seconds:g} s")
    families = {
        family: {name: summary([one[name] for one in many]) for name in many[0]} for family, many in found.items()
    }
    return result(
        "mean completion time over that of the clairvoyant bound",
        "ratio",
        "lower",
        every,
        {},
        targets=TARGETS,
        jobs=jobs,
        nodes=nodes,
        families=families,
    )


def ratios(trace: Sequence[TraceJob], nodes: str) -> dict[str, float]:
    """Return the ratios of ours to the others."""
    known = parse_nodes(nodes)
    ours, fifo = (one.figures for one in compare(trace, known, ("orch", "fifo")))
    bound = figures_of(shortest_remaining(trace, sum(node.gpus for node in known.values())))
    return {
        "mean_over_bound": ours.completion.mean / bound.completion.mean,
        "mean_over_fifo": ours.completion.mean / fifo.completion.mean,
        "p99_wait_over_fifo": ours.wait.p99 / fifo.wait.p99 if fifo.wait.p99 else 1.0,
        "fifo_over_bound": fifo.completion.mean / bound.completion.mean,
        "repeated_share": ours.lost_gpu_seconds / fsum(job.seconds * job.all_gpus for job in trace),
    }


def cuts(trace: Sequence[TraceJob], jobs: int, count: int) -> list[Sequence[TraceJob]]:
    """Return at most ``count`` consecutive parts of ``jobs`` jobs, from the middle of a long trace; at least one."""
    many = max(1, min(count, len(trace) // jobs))
    first = max(0, (len(trace) - many * jobs) // 2)
    return [trace[first + number * jobs : first + (number + 1) * jobs] for number in range(many)]


def nodes_for(trace: Sequence[TraceJob]) -> str:
    """Return as many nodes as the trace needs for its load, and for its largest job."""
    span = max(1.0, trace[-1].at - trace[0].at)
    gpus = fsum(job.seconds * job.all_gpus for job in trace) / (LOAD * span)
    largest = max(job.all_gpus for job in trace)
    return f"{ceil(max(gpus, largest) / GPUS_A_NODE)}x{GPUS_A_NODE}"


@dataclass(slots=True)
class _Left:
    """A job that has not ended."""

    job: TraceJob
    started_at: float | None = None
    preemptions: int = 0


def shortest_remaining(trace: Sequence[TraceJob], gpus: float) -> Outcome:
    """Run the trace with the shortest remaining time first; jobs that need more GPUs than there are count as refused."""
    jobs = sorted((job for job in trace if job.all_gpus <= gpus), key=lambda job: job.at)
    refused = tuple(job for job in trace if job.all_gpus > gpus)
    lives = [_Left(job) for job in jobs]
    waiting: list[tuple[float, int]] = []
    running: list[tuple[float, int]] = []
    ran: list[Ran] = []
    now, arrived = (jobs[0].at if jobs else 0.0), 0
    while arrived < len(jobs) or running:
        arrival = jobs[arrived].at if arrived < len(jobs) else inf
        following = min(arrival, now + running[0][0]) if running else arrival
        running = [(left - (following - now), number) for left, number in running]
        now = following
        for left, number in running:
            if left <= _EPSILON:
                one = lives[number]
                began = now if one.started_at is None else one.started_at
                ran.append(Ran(job=one.job, started_at=began, ended_at=now, preemptions=one.preemptions))
        running = [entry for entry in running if entry[0] > _EPSILON]
        while arrived < len(jobs) and jobs[arrived].at <= now:
            insort(waiting, (jobs[arrived].seconds, arrived))
            arrived += 1
        running, waiting = _choose(running, waiting, lives, gpus, now)
    return Outcome(ran=tuple(ran), refused=refused, usage=Usage(), samples=())


def _choose(
    running: list[tuple[float, int]],
    waiting: list[tuple[float, int]],
    lives: Sequence[_Left],
    gpus: float,
    now: float,
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """Choose which jobs run next, in order of remaining time, and which wait."""
    chosen: list[tuple[float, int]] = []
    left = gpus
    for entry in merge(running, waiting):
        if left <= 0:
            break
        live = lives[entry[1]]
        if live.job.all_gpus <= left:
            left -= live.job.all_gpus
            live.started_at = now if live.started_at is None else live.started_at
            chosen.append(entry)
    if chosen == running:
        return running, waiting
    taken = {number for _, number in chosen}
    stays = [entry for entry in waiting if entry[1] not in taken]
    for entry in running:
        if entry[1] not in taken:
            lives[entry[1]].preemptions += 1
            insort(stays, entry)
    return chosen, stays


if __name__ == "__main__":
    main()
