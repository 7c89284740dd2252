"""Measures the parts of a step's time: data, forward, backward, optimizer.

On the CPU the clock is read at the end of each part. A GPU runs asynchronously, so there the device itself records the
moments (events), in one step of several, and they are read once available, without waiting.
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
"""On a GPU, one step in this many is measured."""

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
        """Record the end of `part`; parts may repeat within a step."""

    def exchange(self, loss: Tensor) -> None:
        """Announce the backward pass of `loss`, which ends with waiting for other ranks."""

    def end(self) -> None:
        """End the step."""

    def take(self) -> Mapping[Part, float]:
        """Return mean seconds per step of each part since the last call; empty when nothing was measured."""


class CpuClock:
    """Reads the clock in the program, which is exact where the CPU computes."""

    def __init__(self) -> None:
        self._seconds = [0.0] * len(Part)
        self._steps = 0
        self._last = perf_counter()

    def begin(self) -> None:
        """Start a step."""
        self._last = perf_counter()

    def mark(self, part: Part) -> None:
        """Record the end of `part`."""
        now = perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def exchange(self, loss: Tensor) -> None:
        """Do nothing: waiting is a part of the backward pass here."""

    def end(self) -> None:
        """End the step."""
        self._steps += 1

    def take(self) -> Mapping[Part, float]:
        """Return mean seconds per step since the last call."""
        steps, seconds = self._steps, self._seconds
        self._steps, self._seconds = 0, [0.0] * len(Part)
        return {part: seconds[part] / steps for part in Part} if steps else {}


class CudaClock:
    """Records the moments on the device, as events."""

    def __init__(self) -> None:
        self._step = -1
        self._marks: list[tuple[Part | None, torch.cuda.Event]] | None = None
        self._waiting: deque[list[tuple[Part | None, torch.cuda.Event]]] = deque(maxlen=_PENDING)

    def begin(self) -> None:
        """Start a step; one in EVERY is measured."""
        self._step += 1
        self._marks = None
        if self._step % EVERY == 0:
            self._marks = []
            self._note(None)

    def mark(self, part: Part) -> None:
        """Record the end of `part`, once the device reaches it."""
        if self._marks is not None:
            self._note(part)

    def exchange(self, loss: Tensor) -> None:
        """Do nothing: waiting is a part of the backward pass here."""

    def end(self) -> None:
        """End the step."""
        if self._marks is not None:
            self._waiting.append(self._marks)
            self._marks = None

    def _note(self, part: Part | None) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        assert self._marks is not None
        self._marks.append((part, event))

    def take(self) -> Mapping[Part, float]:
        """Return mean seconds per step over the measured steps that the device has finished."""
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
