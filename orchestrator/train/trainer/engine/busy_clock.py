"""Measures how long a rank computes in a step, without waits for others: from the step's start until its own gradients are complete.

The end is a callback of the backward pass that is queued before DistributedDataParallel queues its own, which waits for
the other ranks' gradients. On a GPU the device itself records both moments (events), in one step of several.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from orchestrator.train.trainer.engine.step_clock import Part, StepClock

KEPT: Final = 512
"""Steps that are kept until they are read; older ones are dropped."""
EVERY: Final = 8
"""On a GPU, one step in this many is measured."""


class BusyClock:
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
        """Start a step, before its data is fetched."""
        self._step += 1
        self._began = self._now() if self._step % self._every == 0 else None
        self._inner.begin()

    def mark(self, part: Part) -> None:
        """Record the end of `part`."""
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
        """End the step."""
        self._inner.end()

    def take(self) -> Mapping[Part, float]:
        """Return the other clock's measurements."""
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
