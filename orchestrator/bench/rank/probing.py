"""The advisor's measurements inside a rank: a few steps of a model on one rank, and the interference of several ranks."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn

from orchestrator.bench.rank.models import FEATURES, TARGETS, Workload, make_workload, table_batch
from orchestrator.bench.rank.stepping import BucketTimer, DeviceClock, Stepper, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.bench.rank.stepping import Place

_FIRST: Final = 2
_PER_SIZE: Final = (3, 2)
"""Steps that count at the first batch size and at each of the others; one before them warms up, and _FIRST at the first size."""
_WRAPPED: Final = 2
_HOOKED: Final = 2
_WAKING_SECONDS: Final = 0.1
_REFERENCE_SECONDS: Final = 0.25
_REFERENCE_STEPS: Final = (10, 200)
_LINK_REPEATS: Final = (40, 12)
_SMALL_BYTES: Final = 1 << 20
"""All-reduces up to this size are repeated more often: they are short, and differ more among themselves."""
_OVERLAP_REPEATS: Final = 6


class _Budget:
    """Steps and seconds that a probe may use."""

    def __init__(self, steps: int, seconds: float) -> None:
        self._steps, self._seconds = steps, seconds
        self.used, self.spent = 0, 0.0

    def allows(self) -> bool:
        """Whether one more step may be made, by the time of the last ones."""
        longest = self.spent / self.used if self.used else 0.0
        return self.used < self._steps and self.spent + longest <= self._seconds

    def step(self, stepper: Stepper, clock: DeviceClock) -> tuple[float, float, float]:
        """Make a step; return its seconds, and those of its forward and its backward."""
        clock.wait()
        began = perf_counter()
        loss = stepper.forward()
        clock.wait()
        middle = perf_counter()
        loss.backward()
        clock.wait()
        end = perf_counter()
        stepper.update()
        clock.wait()
        seconds = perf_counter() - began
        self.used += 1
        self.spent += seconds
        return seconds, middle - began, end - middle


def probe(
    place: Place,
    rank: int,
    *,
    model: str,
    seed: int,
    precision: str,
    sizes: Sequence[int],
    most_steps: int,
    most_seconds: float,
) -> dict[str, Any]:
    """Make steps on this rank alone: at each batch size, then through DDP at the smallest. Steps beyond the budget are left out."""
    clock, budget = DeviceClock(place.device), _Budget(most_steps, most_seconds)
    workload = make_workload(model, seed)
    _wake(place.device, clock)
    stepper = Stepper(workload, batch=sizes[0], precision=precision, device=place.device, clock=clock, seed=seed + rank)
    points = []
    for index, batch in enumerate(sizes):
        stepper.use(batch)
        warm, counted = (1, _PER_SIZE[1]) if index else (_FIRST, _PER_SIZE[0])
        taken = [budget.step(stepper, clock) for _ in range(warm + counted) if budget.allows()]
        kept = taken[-counted:]
        if kept:
            points.append({"batch": batch, "steps": [s for s, _, _ in kept], "backwards": [b for _, _, b in kept]})
    wrapped: list[float] = []
    buckets: list[tuple[float, int]] = []
    if dist.is_initialized():
        stepper.use(min(sizes))
        stepper.wrap(place.groups[1])
        taken = [budget.step(stepper, clock) for _ in range(1 + _WRAPPED) if budget.allows()]
        wrapped = [seconds for seconds, _, _ in taken[1:]]
        buckets = _buckets(stepper, place, clock, budget)
    return {
        "parameters": workload.parameters,
        "gradient_bytes": sum(p.numel() * p.element_size() for p in workload.model.parameters() if p.requires_grad),
        "points": points,
        "wrapped": wrapped,
        "buckets": buckets,
        "steps": budget.used,
        "seconds": budget.spent,
    }


def _wake(device: torch.device, clock: DeviceClock) -> None:
    """Compute something else for a moment: an idle device makes its first steps at low clocks."""
    matrix = torch.rand(256, 256, device=device)
    began = perf_counter()
    while perf_counter() - began < _WAKING_SECONDS:
        torch.mm(matrix, matrix)
        clock.wait()


def beside(
    place: Place, rank: int, *, ranks: int, model: str, seed: int, precision: str, batch: int, steps: int
) -> list[float]:
    """Return the seconds of a few steps while this many ranks make the same steps, without waiting for each other.

    The first step of each rank warms up. Only the steps of rank 0 count; the others make twice as many, to run until its last one.
    """
    clock, group = DeviceClock(place.device), place.groups[ranks]
    stepper = Stepper(
        make_workload(model, seed), batch=batch, precision=precision, device=place.device, clock=clock, seed=seed + rank
    )
    stepper.step()
    clock.wait()
    together(group, ranks)
    return list(stepper.block(steps if rank == 0 else 2 * steps).steps)


def _buckets(stepper: Stepper, place: Place, clock: DeviceClock, budget: _Budget) -> list[tuple[float, int]]:
    """Return, for the last step, the share of backward after which each bucket is ready, and the bucket's bytes."""
    timer = BucketTimer(clock, place.groups[1])
    stepper.wrap(place.groups[1], timer)
    shares: list[tuple[float, int]] = []
    for _ in range(_HOOKED):
        if not budget.allows():
            break
        marks = timer.begin()
        _, forward, _ = budget.step(stepper, clock)
        ready = [max(0.0, one - forward) for one in clock.since(marks.began, marks.ready)]
        last = max(ready) or 1.0
        shares = [(one / last, size) for one, size in zip(ready, marks.sizes, strict=True)]
    return shares


def all_reduce(place: Place, rank: int, *, ranks: int, sizes: Sequence[int]) -> list[float]:
    """Return the seconds of an all-reduce of each size in bytes, with all ranks starting together."""
    del rank
    group, clock = place.groups[ranks], DeviceClock(place.device)
    found = []
    for size in sizes:
        tensor = torch.zeros(max(1, size // 4), device=place.device)
        times = []
        for _ in range(_LINK_REPEATS[size > _SMALL_BYTES]):
            tensor.mul_(0.5)
            clock.wait()
            together(group, ranks)
            began = perf_counter()
            _reduce(tensor, group, ranks)
            clock.wait()
            times.append(perf_counter() - began)
        found.append(median(times[2:]))
    return found


def _reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None, ranks: int) -> None:
    tensor.div_(ranks)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    work.wait()


def overlap(place: Place, rank: int, *, ranks: int, size: int) -> float:
    """Return the share of an all-reduce that computation hides: 1 where both take as long as the longer alone."""
    del rank
    group, clock = place.groups[ranks], DeviceClock(place.device)
    tensor, matrix = torch.zeros(max(1, size // 4), device=place.device), torch.rand(192, 192, device=place.device)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    def timed(*, communicate: bool, times: int) -> float:
        taken = []
        for _ in range(_OVERLAP_REPEATS):
            clock.wait()
            together(group, ranks)
            began = perf_counter()
            work = dist.all_reduce(tensor, group=group, async_op=True) if communicate else None
            compute(times)
            if work is not None:
                work.wait()
            clock.wait()
            taken.append(perf_counter() - began)
        return median(taken[1:])

    communication = timed(communicate=True, times=0)
    once = timed(communicate=False, times=20) / 20
    count = torch.tensor([float(max(1, math.ceil(communication / once)))])
    dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
    times = int(count.item())
    computation, both = timed(communicate=False, times=times), timed(communicate=True, times=times)
    hidden = (communication + computation - both) / min(communication, computation)
    return min(1.0, max(0.0, hidden))


def reference_steps(pilot: float) -> int:
    """Return the number of steps to make with a reference model that takes ``pilot`` seconds for one."""
    least, most = _REFERENCE_STEPS
    return int(min(max(_REFERENCE_SECONDS / pilot, least), most))


def reference(place: Place, rank: int, *, ranks: int, width: int, layers: int, precision: str) -> dict[str, float]:
    """Return a reference model's seconds per step while this many ranks make one: alone, and waiting for the others after it.

    The number of steps follows from the slowest rank's time.
    """
    clock, group = DeviceClock(place.device), place.groups[ranks]
    torch.manual_seed(rank)
    sizes = [FEATURES, *([width] * layers), TARGETS]
    parts: list[nn.Module] = []
    for before, after in pairwise(sizes):
        parts += [nn.Linear(before, after), nn.ReLU()]
    workload = Workload(model=nn.Sequential(*parts[:-1]), batch=table_batch, loss=nn.functional.mse_loss)
    stepper = Stepper(workload, batch=32, precision=precision, device=place.device, clock=clock, seed=rank)
    pilot = fmean(stepper.block(5).steps[1:])
    wanted = torch.tensor([float(reference_steps(pilot))])  # the same type on every rank, or gloo ends the processes
    if ranks > 1:
        dist.all_reduce(wanted, dist.ReduceOp.MIN, group=group)
    steps = int(wanted.item())
    together(group, ranks)
    alone = stepper.block(steps)
    together(group, ranks)
    clock.wait()
    began = perf_counter()
    for _ in range(steps):
        stepper.step()
        clock.wait()
        together(group, ranks)
    waiting = (perf_counter() - began) / steps
    bytes_ = sum(p.numel() * 4 for p in workload.model.parameters())
    return {"mean": alone.seconds / steps, "median": median(alone.steps), "waiting": waiting, "bytes": float(bytes_)}
