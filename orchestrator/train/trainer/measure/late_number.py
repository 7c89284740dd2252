"""Numbers that a device computes, read without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


class LateNumber:
    """Reads numbers from a device without waiting: each call returns the newest that has arrived."""

    def __init__(self) -> None:
        self._value: float | None = None
        self._host: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def read(self, number: Tensor) -> float | None:
        """Return the number itself on the CPU, else the latest earlier request that has arrived; None before the first."""
        if number.device.type != "cuda":
            return number.item()
        if self._arrived is not None and self._arrived.query():
            assert self._host is not None
            self._value, self._arrived = self._host.item(), None
        if self._arrived is None:
            self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
            self._host.copy_(number.detach().reshape(()), non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        return self._value
