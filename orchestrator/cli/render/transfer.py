"""Progress bar of a transfer of files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from orchestrator.cli.console import clean
from orchestrator.units import size

if TYPE_CHECKING:
    from orchestrator.cli.session import Session


class Bar:
    """Progress on one line of a terminal; prints nothing if standard error is none."""

    def __init__(self, session: Session, total: int) -> None:
        self._shown = sys.stderr.isatty() and not session.console.quiet
        self._session, self._total, self._done, self._name = session, total, 0, ""

    def show(self, name: str) -> None:
        """Show the name of the file that is transferred next."""
        self._name = name
        self.add(0)

    def add(self, count: int) -> None:
        """Add ``count`` transferred bytes."""
        self.at(self._done + count, self._name)

    def at(self, done: int, name: str) -> None:
        """Set the transferred bytes, and the name of the present file."""
        self._done, self._name = done, name
        if self._shown:
            share = min(1.0, self._done / self._total) if self._total else 1.0
            text = f"{share:4.0%} of {size(self._total)}  {clean(self._name)}"
            sys.stderr.write(f"\r\x1b[K{text[: max(20, min(self._session.console.width, 200) - 1)]}")
            sys.stderr.flush()

    def end(self) -> None:
        """Clear the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
