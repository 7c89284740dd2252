"""Makes the driver calls of one reading of a GPU, and counts those that were answered and refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.gpu.drivers.nvidia import fields
from orchestrator.gpu.drivers.nvidia.library import LOST, SUCCESS
from orchestrator.gpu.reader import GpuReadError

if TYPE_CHECKING:
    from orchestrator.gpu.drivers.nvidia.library import Call, FieldBatch, FieldRow, Library
    from orchestrator.gpu.reader import ReadTally


class Asking:
    """Calls the driver for one GPU, and counts the calls of each reading and their answers."""

    def __init__(self, library: Library, uuid: str, tally: ReadTally) -> None:
        self._library = library
        self._uuid = uuid
        self._tally = tally
        self.begin()

    def begin(self) -> None:
        """Begin a reading."""
        self._asked = self._answered = 0

    def answered(self) -> None:
        """Count a call that was made, and answered, elsewhere."""
        self._asked, self._answered = self._asked + 1, self._answered + 1

    def check_answered(self) -> None:
        """Raise GpuReadError when there were calls, and no answer at all."""
        if self._asked and not self._answered:
            raise GpuReadError(f"GPU {self._uuid} answered none of {self._asked} questions. See `nvidia-smi`.")

    def ask(self, call: Call | None) -> bool:
        """Make a call; return whether its results are usable. Raises GpuLostError."""
        return call is not None and self._succeeded(call())

    def rows(self, batch: FieldBatch | None) -> list[FieldRow]:
        """Read a batch of fields; nothing when there is none or the driver refuses it this time. Raises GpuLostError."""
        return batch.rows() if batch is not None and self._succeeded(batch.read()) else []

    def usable(self, batch: FieldBatch | None, rows: list[FieldRow]) -> dict[tuple[int, int], float]:
        """Return the values by field and scope; refused values and blanks are counted and left out."""
        found: dict[tuple[int, int], float] = {}
        if batch is None or not rows:
            return found
        for pair, (result, value, _) in zip(batch.fields, rows, strict=True):
            if result == SUCCESS and value is not None:
                found[pair] = value
            elif pair[0] != fields.POWER_INSTANT:  # power has been counted
                self._tally.failed += result != SUCCESS
                self._tally.blank += result == SUCCESS
        return found

    def _succeeded(self, code: int) -> bool:
        self._asked += 1
        if code == SUCCESS:
            self._answered += 1
            return True
        if code in LOST:
            self._library.check(code, f"GPU {self._uuid}")
        self._tally.failed += 1
        return False
