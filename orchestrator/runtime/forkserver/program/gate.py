"""What a keeper has of the process that it starts: its number, its reports, and the gate that it waits at."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..reports import Reports

_OPEN = b"."


class Gate:
    """A pipe between keeper and child, made before the fork: the child prepares itself, and waits here for its first line."""

    __slots__ = ("_reader", "_writer")

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def for_child(self) -> int:
        """Return the end that the child reads from, which has the other one closed."""
        os.close(self._writer)
        return self._reader

    def for_keeper(self) -> None:
        """Close the child's end, in the keeper."""
        os.close(self._reader)

    def open(self) -> None:
        """Let the child go on, in the keeper; once."""
        writer, self._writer = self._writer, -1
        if writer >= 0:
            with contextlib.suppress(BrokenPipeError):  # the child has ended
                os.write(writer, _OPEN)
            os.close(writer)


def pass_gate(reader: int) -> None:
    """Wait in the child. Without a keeper it ends: its parent-death signal comes a moment after the keeper's files are closed."""
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
