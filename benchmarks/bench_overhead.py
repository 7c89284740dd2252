"""What ``orch bench`` adds to the steps that it measures: its own loop beside one written by hand, of the same model in one process.

Both make the same steps (forward, loss, backward, Adam, gradients cleared) on batches of the same sizes. A value is the mean time of a step in
one turn; turns of the two alternate, and the ratio is the median of the pairs' ratios with its 95 % bootstrap interval.

    python -m benchmarks.bench_overhead --json benchmarks/results/$(date +%F)-bench_overhead.json
"""

from __future__ import annotations

from itertools import cycle
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.measure import interleave, parser, report, result
from benchmarks.trainer_overhead import paired_ratio
from orchestrator.bench.rank.clocks import DeviceClock
from orchestrator.bench.rank.models import make_workload
from orchestrator.bench.rank.stepping import BATCHES, Stepper

if TYPE_CHECKING:
    from collections.abc import Callable

CASES: Final = {"medium": 64, "large": 64, "transformer": 8}
TARGET: Final = 1.005
_SEED: Final = 11


def main() -> None:
    """Measure and report each model."""
    options = parser(__doc__ or "", pairs=40)
    options.add_argument("--seconds", type=float, default=0.5, help="about how long a turn takes (default 0.5)")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    found = {model: measure(model, batch, arguments.pairs, arguments.seconds) for model, batch in CASES.items()}
    first, *others = found.values()
    met = all(one["ratio"]["by_hand"]["high"] <= TARGET for one in found.values())
    report({**first, "also": others, "target_met": met}, arguments.json)


def measure(model: str, batch: int, pairs: int, seconds: float) -> dict[str, Any]:
    """The result for one model."""
    clock = DeviceClock(torch.device("cpu"))
    stepper = Stepper(
        make_workload(model, _SEED), batch=batch, precision="fp32", device=torch.device("cpu"), clock=clock, seed=_SEED
    )
    by_hand = loop_by_hand(model, batch)
    stepper.block(5)
    steps = max(5, int(seconds / (stepper.block(5).seconds / 5)))
    arms = interleave(
        {"ours": lambda: stepper.block(steps).seconds / steps, "by_hand": lambda: by_hand(steps)}, pairs, warm_up=2
    )
    ours, theirs = arms.values["ours"], arms.values["by_hand"]
    made = result(
        "bench_overhead", "s per step", "lower", ours, {"by_hand": theirs}, model=model, batch_size=batch, steps=steps
    )
    made["ratio"] = {"by_hand": paired_ratio(ours, theirs)}
    return made


def loop_by_hand(model: str, batch: int) -> Callable[[int], float]:
    """A function that makes so many steps and returns the mean seconds of one."""
    workload = make_workload(model, _SEED)
    network, loss_of = workload.model.train(), workload.loss
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(_SEED)
    batches = cycle([workload.batch(batch, generator) for _ in range(BATCHES)])

    def run(steps: int) -> float:
        began = perf_counter()
        for _ in range(steps):
            inputs, targets = next(batches)
            loss_of(network(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return (perf_counter() - began) / steps

    return run


if __name__ == "__main__":
    main()
