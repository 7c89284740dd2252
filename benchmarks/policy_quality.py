"""How good the order of the queue is: the daemon's scheduler against FIFO and a clairvoyant bound, in simulated time.

``python -m benchmarks.policy_quality [--trace philly.csv] [--jobs N] [--nodes 8x8] [--pairs SEEDS] [--json FILE]``. For each
family of synthetic traces at load 0.9, and for a trace where one is given, each seed gives a ratio of mean completion times,
ours over FIFO's and ours over the bound's (shortest remaining time first, preemption free, no nodes), and one of the 99th
percentile of waits, ours over FIFO's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.measure import parser, report, result, summary
from orchestrator.analysis.simulation.comparison import compare, parse_nodes
from orchestrator.analysis.simulation.reading import read_trace
from orchestrator.analysis.simulation.synthetic import FAMILIES, synthetic_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.simulation.trace import TraceJob

LOAD: Final = 0.9
TARGETS: Final = {"mean_over_bound": 1.05, "mean_over_fifo": 0.76, "p99_wait_over_fifo": 1.0}


def main() -> None:
    """Measure each family, and the trace."""
    made = parser("completion times of the daemon's scheduler against FIFO's and a bound", 5)
    made.add_argument("--trace", type=Path, help="a trace to play too, as orch simulate reads it")
    made.add_argument("--jobs", type=int, default=20_000, help="of a synthetic trace")
    made.add_argument("--nodes", default="64x8")
    options = made.parse_args()
    trace = read_trace(options.trace) if options.trace else []
    report(measure(options.jobs, options.nodes, options.pairs, trace), options.json)


def measure(jobs: int, nodes: str, seeds: int, trace: Sequence[TraceJob] = ()) -> dict[str, Any]:
    """The ratios, by family; ``ours`` is the mean over the bound's, of all synthetic traces."""
    gpus = sum(node.gpus for node in parse_nodes(nodes).values())
    found = {
        family: [
            ratios(synthetic_trace(family, jobs=jobs, gpus=gpus, load=LOAD, seed=seed), nodes) for seed in range(seeds)
        ]
        for family in FAMILIES
    }
    every = [one["mean_over_bound"] for family in found.values() for one in family]
    if trace:
        found["trace"] = [ratios(trace, nodes)]
    families = {
        family: {name: summary([one[name] for one in many]) for name in TARGETS} for family, many in found.items()
    }
    return result(
        "mean completion time over that of the clairvoyant bound",
        "ratio",
        "lower",
        every,
        {},
        targets=TARGETS,
        families=families,
    )


def ratios(trace: Sequence[TraceJob], nodes: str) -> dict[str, float]:
    """Ours over FIFO's and over the bound's."""
    ours, fifo, bound = (one.figures for one in compare(trace, parse_nodes(nodes), ("orch", "fifo", "srtf")))
    return {
        "mean_over_bound": ours.completion.mean / bound.completion.mean,
        "mean_over_fifo": ours.completion.mean / fifo.completion.mean,
        "p99_wait_over_fifo": ours.wait.p99 / fifo.wait.p99 if fifo.wait.p99 else 1.0,
    }


if __name__ == "__main__":
    main()
