"""Measures the communication of a step: from the hook that DDP calls for each bucket of gradients.

A bucket's all-reduce lasts from its hand-over by DDP until its result is ready. The last bucket is handed over when the
rank's own gradients are complete: the step waits for communication after that (*exposed*); earlier communication is
*hidden* behind the computation of further gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from orchestrator.bench.rank.clocks import DeviceClock, Mark


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
