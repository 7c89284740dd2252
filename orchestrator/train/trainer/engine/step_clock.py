"""Where the time of a step goes: data, forward, backward, optimizer.

On the CPU two readings of the clock per part. A GPU works behind the program's back, so there the device itself writes
down when it came by (events), in one step of a few, and they are read when they are there, without waiting.
"""

from __future__ import annotations

import enum
from collections import deque
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

EVERY = 8
"""On a GPU, one step of this many is measured."""

_PENDING = 64  # measured steps that may wait to be read; more are dropped


class Part(enum.IntEnum):
    """A part of a step, in order of appearance."""

    DATA = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3


class StepClock(Protocol):
    """Measures steps. `begin` and `mark` are on the hot path."""

    def begin(self) -> None:
        """Start a step, before its data is fetched."""

    def mark(self, part: Part) -> None:
        """`part` is over; parts may repeat within a step."""

    def exchange(self, loss: Tensor) -> None:
        """The backward pass of `loss` comes next, and it ends with waiting for other ranks."""

    def end(self) -> None:
        """The step is over."""

    def take(self) -> Mapping[Part, float]:
        """Mean seconds per step of each part since the last call; empty when nothing was measured."""


class CpuClock:
    """Reads the clock of the program, which is the clock of the CPU."""

    def __init__(self) -> None:
        self._seconds = [0.0] * len(Part)
        self._steps = 0
        self._last = perf_counter()

    def begin(self) -> None:
        """Start a step."""
        self._last = perf_counter()

    def mark(self, part: Part) -> None:
        """`part` is over."""
        now = perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def exchange(self, loss: Tensor) -> None:
        """Waiting is a part of the backward pass here."""

    def end(self) -> None:
        """The step is over."""
        self._steps += 1

    def take(self) -> Mapping[Part, float]:
        """Mean seconds per step since the last call."""
        steps, seconds = self._steps, self._seconds
        self._steps, self._seconds = 0, [0.0] * len(Part)
        return {part: seconds[part] / steps for part in Part} if steps else {}


class CudaClock:
    """Lets the device write down when it came by."""

    def __init__(self) -> None:
        self._step = -1
        self._marks: list[tuple[Part | None, torch.cuda.Event]] | None = None
        self._waiting: deque[list[tuple[Part | None, torch.cuda.Event]]] = deque(maxlen=_PENDING)

    def begin(self) -> None:
        """Start a step; one of EVERY is measured."""
        self._step += 1
        self._marks = None
        if self._step % EVERY == 0:
            self._marks = []
            self._note(None)

    def mark(self, part: Part) -> None:
        """`part` is over, once the device gets here."""
        if self._marks is not None:
            self._note(part)

    def exchange(self, loss: Tensor) -> None:
        """Waiting is a part of the backward pass here."""

    def end(self) -> None:
        """The step is over."""
        if self._marks is not None:
            self._waiting.append(self._marks)
            self._marks = None

    def _note(self, part: Part | None) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        assert self._marks is not None
        self._marks.append((part, event))

    def take(self) -> Mapping[Part, float]:
        """Mean seconds per step over the measured steps that the device has finished."""
        seconds, steps = [0.0] * len(Part), 0
        while self._waiting and self._waiting[0][-1][1].query():
            marks = self._waiting.popleft()
            steps += 1
            for (_, before), (part, after) in pairwise(marks):
                assert part is not None
                seconds[part] += before.elapsed_time(after) / 1000
        return {part: seconds[part] / steps for part in Part} if steps else {}


def make_clock(device: torch.device) -> StepClock:
    """The clock that fits `device`."""
    return CudaClock() if device.type == "cuda" else CpuClock()
