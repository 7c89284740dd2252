"""The process that a keeper starts: its number, its reports, and the gate at which it waits."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..reports import Reports

_OPEN = b"."


class Gate:
    """Pipe between keeper and child, created before the fork: the child prepares itself, then waits before its first line."""

    __slots__ = ("_reader", "_writer")

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def for_child(self) -> int:
        """Return the end that the child reads from, and close the other one, in the child."""
        os.close(self._writer)
        return self._reader

    def for_keeper(self) -> None:
        """Close the child's end, in the keeper."""
        os.close(self._reader)

    def open(self) -> None:
        """Let the child continue, in the keeper; later calls do nothing."""
        writer, self._writer = self._writer, -1
        if writer >= 0:
            with contextlib.suppress(BrokenPipeError):  # the child has ended
                os.write(writer, _OPEN)
            os.close(writer)


def pass_gate(reader: int) -> None:
    """Wait in the child until the gate opens; end the child if its keeper has ended.

    The parent-death signal arrives a moment after the keeper's files are closed.
    """
    if os.read(reader, 1) != _OPEN:
        os._exit(1)
    os.close(reader)


@dataclass(frozen=True, slots=True)
class Child:
    """The process of one keeper."""

    pid: int
    started_at: float
    reports: Reports
    gate: Gate
