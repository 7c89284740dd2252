"""Counts a GPU's memory errors since the attempt began, and those of the newest ten minutes. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.core import thresholds as d

if TYPE_CHECKING:
    from orchestrator.core.diagnosis.observation import GpuSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryErrors:
    """``uncorrected`` errors and ``remapped`` rows since the first look, ``corrected`` errors of the newest ten minutes."""

    uncorrected: int = 0
    corrected: int = 0
    remapped: int = 0


NO_ERRORS: Final = MemoryErrors()


class ErrorWindow:
    """Memory errors of one GPU. A counter that decreases was reset; the decrease adds nothing."""

    def __init__(self) -> None:
        self._uncorrected = _Count()
        self._remapped = _Count()
        self._corrected = _Count()
        self._lately: deque[tuple[float, int]] = deque()

    def add(self, clock: float, gpu: GpuSeen) -> None:
        """Add the GPU's counters."""
        self._uncorrected.add(gpu.uncorrected)
        self._remapped.add(gpu.remapped)
        more = self._corrected.add(gpu.corrected)
        if more:
            self._lately.append((clock, more))
        while self._lately and self._lately[0][0] <= clock - d.COUNTED_SECONDS:
            self._lately.popleft()

    def errors(self) -> MemoryErrors:
        """Return the errors counted so far."""
        return MemoryErrors(
            uncorrected=self._uncorrected.since,
            corrected=sum(more for _, more in self._lately),
            remapped=self._remapped.since,
        )


class _Count:
    def __init__(self) -> None:
        self._newest: int | None = None
        self.since = 0

    def add(self, count: int | None) -> int:
        """Add a count; return its increase since the last one, 0 for the first."""
        if count is None:
            return 0
        more = 0 if self._newest is None else max(0, count - self._newest)
        self._newest = count
        self.since += more
        return more
