"""Values that take the driver milliseconds of processor time: a sparing reader reads them rarely and repeats them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.drivers.nvidia.fields import ENERGY

if TYPE_CHECKING:
    import ctypes

    from orchestrator.gpu.drivers.nvidia.asking import Asking
    from orchestrator.gpu.drivers.nvidia.library import Call, FieldBatch

ENERGY_SECONDS: Final = 1.5
"""With one reading a second, the energy is read at every other one: it takes 4 ms of processor time on an H100."""
SLOW_SECONDS: Final = 4.5
"""The slow fields are read at every fifth one: on an H100 they take 2 ms together, and all other values 0.1 ms."""


@dataclass(frozen=True, slots=True)
class EnergySource:
    """The energy in mJ since the driver was loaded: from a field, else the older call; neither where the GPU does not count it."""

    batch: FieldBatch | None
    call: Call | None
    out: ctypes.c_ulonglong

    def read(self, asking: Asking) -> float | None:
        """Return the energy in joules; None where the driver does not give it, or not this time."""
        found = asking.usable(self.batch, asking.rows(self.batch)).get((ENERGY, 0))
        if found is None and asking.ask(self.call):
            found = self.out.value
        return None if found is None else found / 1e3


class SlowReadings:
    """The slow fields and the energy, with their last values. ``now`` is in monotonic seconds."""

    def __init__(self, asking: Asking, *, fields: FieldBatch | None, energy: EnergySource) -> None:
        self._asking = asking
        self._batch = fields
        self._energy = energy
        self._seen: dict[tuple[int, int], float] = {}
        self._joules: float | None = None
        self._due = self._energy_due = 0.0

    def fields(self, now: float, *, sparing: bool) -> dict[tuple[int, int], float]:
        """Return the slow fields' values by field and scope."""
        if now >= self._due:
            self._due = now + (SLOW_SECONDS if sparing else 0.0)
            self._seen = self._asking.usable(self._batch, self._asking.rows(self._batch))
        return self._seen

    def energy_joules(self, now: float, *, sparing: bool) -> float | None:
        """Return the energy since the driver was loaded; None where it is not known."""
        if now >= self._energy_due:
            self._energy_due = now + (ENERGY_SECONDS if sparing else 0.0)
            self._joules = self._energy.read(self._asking)
        return self._joules
