"""Points in time of a device's work: readings of ``perf_counter`` on a CPU, events of the current stream on a GPU.

On a GPU a mark records when the device reaches it, not when Python did: nothing waits until the marks are read.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

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
