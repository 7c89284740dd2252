"""Measures what ``orch bench`` adds to its steps: its own loop (``Stepper.block``) beside a loop written by hand.

The place of objects in memory changes a step by more than the loop adds to it. Both loops therefore train the *same* model with the same
optimizer on the same batches, and a second loop by hand does so, too: its ratio to the first is the control (A/A), which no method can beat. A
third loop by hand has objects of its own, made before the others in every other process: it shows the effect of the memory layout. Every group
of turns has a process of its own; within it the loops take turns, in opposite orders. A value is the mean of one turn's steps, by the wall clock
and in processor time. The ratio is the median of the pairs' ratios; its 95 % interval comes from resampled groups and resampled pairs within
them. Interpreted instructions are counted, not timed.

    python -m benchmarks.bench_overhead --json benchmarks/results/$(date +%F)-bench_overhead.json
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from dataclasses import replace
from itertools import cycle
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from benchmarks.measure import RESAMPLES, parser, report, result
from orchestrator.bench.rank.models import Workload, make_workload
from orchestrator.bench.rank.stepping import BATCHES, DeviceClock, Stepper

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from numpy.typing import NDArray
    from torch import Tensor

    Turn = Callable[[int], object]
    Seconds = Mapping[str, Sequence[float]]

CASES: Final = {"medium": 64, "large": 64, "transformer": 8}
TARGET: Final = 1.005
ARMS: Final = ("ours", "by_hand", "control", "apart")
CLOCKS: Final = {"wall": perf_counter, "processor": process_time}
_SEED: Final = 11
_COUNTED: Final = 10


def main() -> None:
    """Measure and report each model; with ``--group``, be the process of one group of turns."""
    options = parser(__doc__ or "", pairs=12)
    options.add_argument("--groups", type=int, default=8, help="processes, each with so many pairs (default 8)")
    options.add_argument("--seconds", type=float, default=0.2, help="about how long a turn takes (default 0.2)")
    options.add_argument("--group", metavar="MODEL:NUMBER", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    if arguments.group:
        model, _, number = arguments.group.partition(":")
        print(json.dumps(group(model, int(number), arguments.pairs, arguments.seconds)))
        return
    found = {model: measure(model, arguments.groups, arguments.pairs, arguments.seconds) for model in CASES}
    first, *others = found.values()
    verdicts = {model: verdict(one["ratio"]) for model, one in found.items()}
    report({**first, "also": others, "target": TARGET, "verdicts": verdicts}, arguments.json)


def verdict(ratio: Mapping[str, Mapping[str, float]]) -> str:
    """Return whether the interval of a model's ratio meets or misses the target, or shows neither."""
    ours, control = ratio["by_hand"], ratio["control_by_hand"]
    if ours["high"] <= TARGET:
        return "met"
    if ours["low"] > TARGET:
        return "missed"
    return "not shown: two loops by hand differ by more" if control["high"] > TARGET else "not shown"


def measure(model: str, groups: int, pairs: int, seconds: float) -> dict[str, Any]:
    """Return the result for one model."""
    found = [_in_a_process(model, number, pairs, seconds) for number in range(groups)]
    wall, processor = ([one[clock] for one in found] for clock in CLOCKS)
    values = {arm: [value for one in wall for value in one[arm]] for arm in ARMS}
    ours = values.pop("ours")
    made = result("bench_overhead", "s per step", "lower", ours, values, model=model, batch_size=CASES[model])
    return {
        **made,
        "groups": groups,
        "pairs": pairs,
        "ratio": _ratios(wall),
        "ratio_processor": _ratios(processor),
        "added_microseconds": of_groups(wall, lambda one: 1e6 * (one["ours"] - one["by_hand"])),
        "control_microseconds": of_groups(wall, lambda one: 1e6 * (one["control"] - one["by_hand"])),
        "interpreted_instructions_per_step": found[0]["instructions"],
        "turns": [{"steps": one["steps"], **{clock: one[clock] for clock in CLOCKS}} for one in found],
    }


def _in_a_process(model: str, number: int, pairs: int, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.bench_overhead", f"--group={model}:{number}"]
    command += [f"--pairs={pairs}", f"--seconds={seconds}"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    print(f"{model} {number}: done", file=sys.stderr)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def _ratios(groups: Sequence[Seconds]) -> dict[str, dict[str, float]]:
    """Return the ratios of our loop to each loop by hand, and of the other loops to the first one by hand."""
    return {
        "by_hand": of_groups(groups, lambda one: one["ours"] / one["by_hand"]),
        "apart": of_groups(groups, lambda one: one["ours"] / one["apart"]),
        "control_by_hand": of_groups(groups, lambda one: one["control"] / one["by_hand"]),
        "apart_by_hand": of_groups(groups, lambda one: one["apart"] / one["by_hand"]),
    }


def of_groups(
    groups: Sequence[Seconds], value: Callable[[Mapping[str, NDArray[Any]]], NDArray[Any]]
) -> dict[str, float]:
    """Return the median of a value of each pair, with its 95 % interval, from resampled groups and pairs within."""
    pairs = np.asarray([value({arm: np.asarray(seconds) for arm, seconds in one.items()}) for one in groups])
    generator, (count, length) = np.random.default_rng(_SEED), pairs.shape
    drawn = (
        generator.integers(count, size=(RESAMPLES, count, 1)),
        generator.integers(length, size=(RESAMPLES, count, length)),
    )
    low, high = np.percentile(np.median(pairs[drawn].reshape(RESAMPLES, -1), axis=1), [2.5, 97.5])
    return {"median": float(np.median(pairs)), "low": float(low), "high": float(high)}


def group(model: str, number: int, pairs: int, seconds: float) -> dict[str, Any]:
    """Return the seconds of a step in each turn of each loop, in this process."""
    turns = loops(model, apart_first=number % 2 == 1)
    for turn in turns.values():
        turn(5)
    began = perf_counter()
    turns["by_hand"](10)
    steps = max(5, round(seconds / ((perf_counter() - began) / 10)))
    found: dict[str, Any] = {clock: {arm: [] for arm in ARMS} for clock in CLOCKS}
    for pair in range(-1, pairs):
        for arm in ARMS if (pair + number) % 2 else reversed(ARMS):
            before = [clock() for clock in CLOCKS.values()]
            turns[arm](steps)
            for name, clock, start in zip(CLOCKS, CLOCKS.values(), before, strict=True):
                if pair >= 0:
                    found[name][arm].append((clock() - start) / steps)
    counted = {arm: instructions(turns[arm]) for arm in ("ours", "by_hand")}
    return {**found, "steps": steps, "instructions": counted}


def loops(model: str, *, apart_first: bool) -> dict[str, Turn]:
    """Return the four loops; each makes the given number of steps."""
    batch = CASES[model]
    early = make_workload(model, _SEED) if apart_first else None
    workload = make_workload(model, _SEED)
    batches = made_batches(workload, batch)
    handed = iter(batches)
    device = torch.device("cpu")
    stepper = Stepper(
        replace(workload, batch=lambda _samples, _generator: next(handed)),
        batch=batch,
        precision="fp32",
        device=device,
        clock=DeviceClock(device),
        seed=_SEED,
    )
    other = early or make_workload(model, _SEED)
    shared = workload.model, workload.loss, stepper.optimizer, batches
    own = torch.optim.Adam(other.model.parameters(), lr=1e-3)
    return {
        "ours": stepper.block,
        "by_hand": loop_by_hand(*shared),
        "control": loop_by_hand(*shared),
        "apart": loop_by_hand(other.model.train(), other.loss, own, made_batches(other, batch)),
    }


def made_batches(workload: Workload, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Return as many batches as ``orch bench`` trains on."""
    generator = torch.Generator().manual_seed(_SEED)
    return [workload.batch(batch, generator) for _ in range(BATCHES)]


def loop_by_hand(
    network: torch.nn.Module,
    loss_of: Callable[[Any, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    made: Sequence[tuple[Tensor, Tensor]],
) -> Turn:
    """Return a function that makes the given number of steps."""
    batches = cycle(made)

    def run(steps: int) -> None:
        for _ in range(steps):
            inputs, targets = next(batches)
            loss_of(network(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def instructions(turn: Turn) -> float:
    """Return the interpreter's instructions of a step; those of the turn itself are subtracted."""
    few, many = (_instructions_of(turn, steps) for steps in (_COUNTED, 2 * _COUNTED))
    return (many - few) / _COUNTED


def _instructions_of(turn: Turn, steps: int) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    gc.collect()
    gc.disable()  # a finalizer of something else would count too
    sys.settrace(trace)
    try:
        turn(steps)
    finally:
        sys.settrace(None)
        gc.enable()
    return count


if __name__ == "__main__":
    main()
