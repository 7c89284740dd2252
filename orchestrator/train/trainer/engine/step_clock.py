# ruff: noqa: D102 - StepClock documents the methods
"""Measures the parts of a step's time: data, forward, backward, optimizer.

On the CPU the clock is read at the end of each part. A GPU runs asynchronously, so there the device itself records the
moments (events), in one step of several, and they are read once available, without waiting.

A rank is busy from the start of a step until its own gradients are complete, without the wait for others. The end is a
callback of the backward pass that is queued before DistributedDataParallel queues its own, which waits for the other
ranks' gradients.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import deque
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

EVERY = 8
"""On a GPU, one step in this many is measured."""

_PENDING = 64  # measured steps that may wait to be read; more are dropped


class Part(enum.IntEnum):
    """A part of a step, in order of appearance."""

    DATA = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3


class StepClock(ABC):
    """Measures steps. `begin` and `mark` are on the hot path."""

    @abstractmethod
    def begin(self) -> None:
        """Start a step, before its data is fetched."""

    @abstractmethod
    def mark(self, part: Part) -> None:
        """Record the end of `part`; parts may repeat within a step."""

    def exchange(self, loss: Tensor) -> None:  # noqa: B027 - waiting is a part of the backward pass for most clocks
        """Announce the backward pass of `loss`, which ends with waiting for other ranks."""

    @abstractmethod
    def end(self) -> None:
        """End the step."""

    @abstractmethod
    def take(self) -> Mapping[Part, float]:
        """Return mean seconds per step of each part since the last call; empty when nothing was measured."""


class CpuClock(StepClock):
    """Reads the clock in the program, which is exact where the CPU computes."""

    def __init__(self) -> None:
        self._seconds = [0.0] * len(Part)
        self._steps = 0
        self._last = perf_counter()

    def begin(self) -> None:
        self._last = perf_counter()

    def mark(self, part: Part) -> None:
        now = perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def end(self) -> None:
        self._steps += 1

    def take(self) -> Mapping[Part, float]:
        steps, seconds = self._steps, self._seconds
        self._steps, self._seconds = 0, [0.0] * len(Part)
        return {part: seconds[part] / steps for part in Part} if steps else {}


class CudaClock(StepClock):
    """Records the moments on the device, as events, in one step of EVERY."""

    def __init__(self) -> None:
        self._step = -1
        self._marks: list[tuple[Part | None, torch.cuda.Event]] | None = None
        self._waiting: deque[list[tuple[Part | None, torch.cuda.Event]]] = deque(maxlen=_PENDING)

    def begin(self) -> None:
        self._step += 1
        self._marks = [(None, _event())] if self._step % EVERY == 0 else None

    def mark(self, part: Part) -> None:
        if self._marks is not None:
            self._marks.append((part, _event()))

    def end(self) -> None:
        if self._marks is not None:
            self._waiting.append(self._marks)
            self._marks = None

    def take(self) -> Mapping[Part, float]:
        """Take the measured steps that the device has finished."""
        seconds, steps = [0.0] * len(Part), 0
        while self._waiting and self._waiting[0][-1][1].query():
            marks = self._waiting.popleft()
            steps += 1
            for (_, before), (part, after) in pairwise(marks):
                assert part is not None
                seconds[part] += before.elapsed_time(after) / 1000
        return {part: seconds[part] / steps for part in Part} if steps else {}


def make_clock(device: torch.device) -> StepClock:
    """Return the clock for `device`."""
    return CudaClock() if device.type == "cuda" else CpuClock()


KEPT: Final = 512
"""Steps that are kept until they are read; older ones are dropped."""


class BusyClock(StepClock):
    """A step clock that measures busy times in addition to another clock's measurements."""

    def __init__(self, inner: StepClock, device: torch.device, now: Callable[[], Any] | None = None) -> None:
        """`now` returns a moment: seconds on a CPU, an event on a GPU."""
        self._inner = inner
        self._on_gpu = device.type == "cuda"
        self._now = now or (_event if self._on_gpu else perf_counter)
        self._every = EVERY if self._on_gpu else 1
        self._step = -1
        self._began: Any = None
        self._measured: deque[tuple[Any, Any]] = deque(maxlen=KEPT)

    def begin(self) -> None:
        self._step += 1
        self._began = self._now() if self._step % self._every == 0 else None
        self._inner.begin()

    def mark(self, part: Part) -> None:
        self._inner.mark(part)

    def exchange(self, loss: Tensor) -> None:
        """Arrange that the end of this rank's own part of the backward pass is recorded."""
        self._inner.exchange(loss)
        if self._began is not None:
            loss.register_hook(self._queue)

    def _queue(self, _gradient: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self.done)  # noqa: SLF001 - torch has no public way

    def done(self) -> None:
        """Record that the step's own gradients are complete."""
        if self._began is not None:
            self._measured.append((self._began, self._now()))
            self._began = None

    def end(self) -> None:
        self._inner.end()

    def take(self) -> Mapping[Part, float]:
        return self._inner.take()

    def busy_seconds(self) -> Sequence[float]:
        """Return the busy times of the measured steps since the last call that the device has finished."""
        measured = list(self._measured)
        self._measured.clear()
        if not self._on_gpu:
            return [end - began for began, end in measured]
        return [began.elapsed_time(end) / 1000 for began, end in measured if end.query()]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
