"""Training steps, timed: warm-up until stable, a block of steps as a script would make them, and two controls.

The block is timed as a whole, waiting for the device at both ends only; each step's own time is recorded too. The
controls run separately, so that measuring disturbs nothing: the same steps without communication, and with DDP's hook.
A bucket's all-reduce lasts from its hand-over by DDP until its result is ready. The last bucket is handed over when the
rank's own gradients are complete: the step waits for communication after that (*exposed*); earlier communication is
*hidden* behind the computation of further gradients.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from orchestrator.bench.rank.models import Workload

Mark = Any


class DeviceClock:
    """Makes marks on one device, and computes the seconds between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Mark:
        """Return a mark at the present point of the device's work."""
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Return when the device has completed its work."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def since(self, first: Mark, marks: Sequence[Mark]) -> list[float]:
        """Return seconds from the first mark to each of the others; all must have been reached."""
        if not self._on_gpu:
            return [float(mark - first) for mark in marks]
        return [first.elapsed_time(mark) / 1e3 for mark in marks]


@dataclass(slots=True)
class Place:
    """A rank's device, and the process groups of the first ranks by their number."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    groups: dict[int, dist.ProcessGroup | None] = field(default_factory=dict)


@dataclass(slots=True)
class StepMarks:
    """The marks of one step."""

    began: Mark = None
    backward_done: Mark = None
    ready: list[Mark] = field(default_factory=list)
    reduced: list[Mark] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Size of all buckets."""
        return sum(self.sizes)


class BucketTimer:
    """State of the hook: records when each bucket is handed over and when its all-reduce is done."""

    def __init__(self, clock: DeviceClock, group: dist.ProcessGroup | None) -> None:
        self._clock = clock
        self._group = group
        self.step = StepMarks()

    def begin(self) -> StepMarks:
        """Start a step's marks."""
        self.step = StepMarks(began=self._clock.mark())
        return self.step

    def reduce(self, bucket: Any) -> Any:
        """All-reduce a bucket as DDP does by itself, with marks around it; return a future of the tensor."""
        step, clock = self.step, self._clock
        tensor: Tensor = bucket.buffer()
        step.ready.append(clock.mark())
        step.sizes.append(tensor.numel() * tensor.element_size())
        tensor.div_(dist.get_world_size(self._group))
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None

        def done(future: Any) -> Tensor:
            step.reduced.append(clock.mark())
            result: Tensor = future.value()[0]
            return result

        return work.get_future().then(done)


def split(clock: DeviceClock, step: StepMarks) -> tuple[float, float]:
    """Return the seconds of a step's exposed and hidden communication."""
    if not step.ready:
        return 0.0, 0.0
    ready = clock.since(step.began, step.ready)
    reduced = clock.since(step.began, step.reduced)
    (end,) = clock.since(step.began, [step.backward_done])
    return exposed_and_hidden(list(zip(ready, reduced, strict=True)), end)


def exposed_and_hidden(buckets: Sequence[tuple[float, float]], backward_end: float) -> tuple[float, float]:
    """Return the seconds in which the step waited for all-reduces, and seconds of all-reduces before that.

    ``buckets`` are times (handed over, reduced); they overlap where several all-reduces run at once.
    """
    last_ready = max(ready for ready, _ in buckets)
    exposed = max(0.0, backward_end - last_ready)
    hidden, until = 0.0, 0.0
    for ready, reduced in sorted(buckets):
        first, last = max(ready, until), min(reduced, last_ready)
        if last > first:
            hidden += last - first
            until = last
    return exposed, hidden


BATCHES: Final = 4
WINDOW: Final = 10
STABLE: Final = 0.05
MAX_WINDOWS: Final = 10
MAX_SECONDS: Final = 3.0
"""Warm-up begins no further window after this time."""
_AUTOCAST: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Steps made one after another: seconds of all of them and of each."""

    seconds: float
    steps: tuple[float, ...]


class Stepper:
    """Makes optimizer steps of one model with Adam on a few fixed batches."""

    def __init__(
        self,
        workload: Workload,
        *,
        batch: int,
        precision: str,
        device: torch.device,
        clock: DeviceClock,
        seed: int,
        accumulate: int = 1,
    ) -> None:
        self.model = workload.model.to(device).train()
        self.wrapped: torch.nn.Module = self.model
        self._loss = workload.loss
        self._clock = clock
        self._autocast = (device.type, _AUTOCAST[precision]) if precision in _AUTOCAST else None
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._make = workload.batch
        self._seed = seed
        self._passes = accumulate
        self.use(batch)

    def use(self, batch: int) -> None:
        """Train with batches of this size from now on: each step uses one, in as many passes as are accumulated."""
        generator = torch.Generator().manual_seed(self._seed)
        made = [self._make(batch // self._passes, generator) for _ in range(BATCHES)]
        self._batches = cycle([(inputs.to(self._device), targets.to(self._device)) for inputs, targets in made])

    def wrap(self, group: dist.ProcessGroup | None, timer: BucketTimer | None = None) -> None:
        """Train through DDP from now on, with the timer, if given, as its hook."""
        ids = [self._device.index] if self._device.type == "cuda" else None
        self.wrapped = DistributedDataParallel(self.model, device_ids=ids, process_group=group)
        if timer is not None:
            self.wrapped.register_comm_hook(
                timer, lambda state, bucket: state.reduce(bucket)
            )  # DDP refuses annotations of Any

    def spread(self, gpus: int) -> None:
        """Distribute each batch over this many GPUs, from this process (DataParallel)."""
        self.wrapped = DataParallel(self.model, device_ids=list(range(gpus)))

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(self) -> Tensor:
        """Return the loss of the next batch, scaled for fp16. A disabled autocast or scaler costs microseconds: fp32 uses none."""
        inputs, targets = next(self._batches)
        if self._autocast is None:
            return self._loss(self.wrapped(inputs), targets)
        kind, dtype = self._autocast
        with torch.autocast(kind, dtype=dtype):
            loss = self._loss(self.wrapped(inputs), targets)
        return loss if self._scaler is None else self._scaler.scale(loss)

    def update(self) -> None:
        """Apply the gradients and clear them."""
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Make one whole step."""
        self.backward()
        self.update()

    def backward(self) -> None:
        """Run forward and backward of every pass; the last pass communicates gradients."""
        if self._passes == 1:
            self.forward().backward()
            return
        with self.without_communication():
            for _ in range(self._passes - 1):
                (self.forward() / self._passes).backward()
        (self.forward() / self._passes).backward()

    def without_communication(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which steps do not communicate gradients."""
        return self.wrapped.no_sync() if isinstance(self.wrapped, DistributedDataParallel) else contextlib.nullcontext()

    def block(self, steps: int) -> Block:
        """Make and time this many steps."""
        clock = self._clock
        clock.wait()
        began = perf_counter()
        marks = [clock.mark(), *(self._marked() for _ in range(steps))]
        clock.wait()
        seconds = perf_counter() - began
        ends = clock.since(marks[0], marks[1:])
        return Block(seconds=seconds, steps=tuple(b - a for a, b in zip([0.0, *ends], ends, strict=False)))

    def _marked(self) -> Any:
        self.step()
        return self._clock.mark()

    def hooked(self, timer: BucketTimer, steps: int) -> Iterator[StepMarks]:
        """Make this many steps; yield the hook's marks of each."""
        for _ in range(steps):
            marks = timer.begin()
            self.backward()
            marks.backward_done = self._clock.mark()
            self.update()
            yield marks


def together(group: dist.ProcessGroup | None, ranks: int) -> None:
    """Return when every rank of the group has arrived."""
    if ranks > 1:
        dist.all_reduce(torch.zeros(1), group=group)


def warm_up(stepper: Stepper, group: dist.ProcessGroup | None, ranks: int, window: int = WINDOW) -> tuple[int, bool]:
    """Make steps until a window's median is within 5 % of the previous one's; return their number, and whether it is.

    The ranks decide together, by the least stable and the slowest of them: a rank that went on alone would wait for ever.
    """
    first = stepper.block(window)
    before, spent = median(first.steps), first.seconds
    for windows in range(2, MAX_WINDOWS + 1):
        block = stepper.block(window)
        now, spent = median(block.steps), spent + block.seconds
        measured = torch.tensor([abs(now - before) / before if before else 0.0, spent])
        if ranks > 1:
            dist.all_reduce(measured, dist.ReduceOp.MAX, group=group)
        change, longest = measured.tolist()
        if change <= STABLE or longest >= MAX_SECONDS:
            return windows * window, change <= STABLE
        before = now
    return MAX_WINDOWS * window, False


def communication_split(
    stepper: Stepper, clock: DeviceClock, group: dist.ProcessGroup | None, ranks: int, steps: int
) -> dict[str, float]:
    """Measure a mean step's computation without communication, and its exposed and hidden communication, in seconds."""
    with stepper.without_communication():
        stepper.block(max(1, steps // 4))
        together(group, ranks)
        compute = fmean(stepper.block(steps).steps)
    timer = BucketTimer(clock, group)
    stepper.wrap(group, timer)
    list(stepper.hooked(timer, 3))  # DDP orders its buckets anew after the first step
    together(group, ranks)
    marks = list(stepper.hooked(timer, steps))
    clock.wait()
    parts = [split(clock, one) for one in islice(marks, steps)]
    return {
        "compute_seconds": compute,
        "exposed_seconds": fmean(exposed for exposed, _ in parts),
        "hidden_seconds": fmean(hidden for _, hidden in parts),
        "bytes": float(marks[-1].bytes),
        "buckets": float(len(marks[-1].ready)),
    }
