"""Measures the order of the queue: the daemon's scheduler against FIFO, published policies and a clairvoyant bound, in simulated time.

``python -m benchmarks.policy_quality [--trace philly.csv] [--jobs N] [--nodes 64x8] [--pairs SEEDS] [--json FILE]``. For each
family of synthetic traces at load 0.9, and for a cut of a trace on as many nodes as give that load, each seed gives ratios of mean
completion times and of the 99th percentile of waits. Ours are two: the daemon with ``ORCH_TIME_SHARING=1m``, and with its defaults (``default``).
No job declares a duration, and the durations of like jobs are unknown. The bound (shortest remaining time first) and the published policies
(``las``, ``tiresias``) have advantages that no scheduler has: preemption is free, and GPUs have no nodes. Jobs save every 30 minutes.

It takes hours at its default sizes. With ``--keep FILE`` the ratios of each trace are kept there, and the next call continues with the rest;
``--seconds N`` ends a call after about that time, with the result so far: every family's first seed comes first.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from math import ceil, fsum, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import kept
from benchmarks.measure import parser, report, result, summary
from orchestrator.analysis.simulation.comparison import compare, parse_nodes
from orchestrator.analysis.simulation.reading import read_trace
from orchestrator.analysis.simulation.synthetic import FAMILIES, synthetic_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core.simulation.trace import TraceJob

LOAD: Final = 0.9
GPUS_A_NODE: Final = 8
CUT: Final = "trace"
TARGETS: Final = {
    "mean_over_bound": 1.05,
    "mean_over_fifo": 0.76,
    "p99_wait_over_fifo": 1.0,
    "mean_over_tiresias": 1.0,
    "mean_over_las": 1.0,
}
POLICIES: Final = ("orch-shared", "orch", "fifo", "srtf", "tiresias", "las")


def main() -> None:
    """Measure each family, and the trace."""
    made = parser("completion times of the daemon's scheduler against FIFO's, published policies' and a bound", 5)
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
    """Return the ratios of ours to the others; ``default`` is without time sharing."""
    found = {one.policy: one.figures for one in compare(trace, parse_nodes(nodes), POLICIES)}
    mean = {name: figures.completion.mean for name, figures in found.items()}
    ours, default, fifo = found["orch-shared"], found["orch"], found["fifo"]
    return {
        "mean_over_bound": mean["orch-shared"] / mean["srtf"],
        "mean_over_fifo": mean["orch-shared"] / mean["fifo"],
        "p99_wait_over_fifo": ours.wait.p99 / fifo.wait.p99 if fifo.wait.p99 else 1.0,
        "mean_over_tiresias": mean["orch-shared"] / mean["tiresias"],
        "mean_over_las": mean["orch-shared"] / mean["las"],
        "fifo_over_bound": mean["fifo"] / mean["srtf"],
        "tiresias_over_bound": mean["tiresias"] / mean["srtf"],
        "las_over_bound": mean["las"] / mean["srtf"],
        "default_mean_over_bound": mean["orch"] / mean["srtf"],
        "default_mean_over_fifo": mean["orch"] / mean["fifo"],
        "default_p99_wait_over_fifo": default.wait.p99 / fifo.wait.p99 if fifo.wait.p99 else 1.0,
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


if __name__ == "__main__":
    main()
