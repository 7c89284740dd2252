"""A progress page of which a test plays both sides: the rank, which writes, and its actor, which creates, reads and requests a stop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from orchestrator.train.script.progress import ProgressPage, create_page
from orchestrator.train.script.progress_reading import PageReader, snapshot_of

if TYPE_CHECKING:
    from orchestrator.train.script.progress_reading import ProgressSnapshot


class BothSides(ProgressPage):
    """The rank's page, with the actor's methods."""

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create a blank page and open it."""
        os.close(create_page(path))
        return cls.open(path)

    def read(self) -> ProgressSnapshot:
        """Return the newest report. Raises ProgressPageError for a damaged page."""
        return snapshot_of(lambda: self._page[:])

    def request_stop(self) -> None:
        """Request a stop as the actor does."""
        handle = os.open(self.path, os.O_RDWR)
        reader = PageReader(self.path, handle)
        reader.request_stop()
        reader.close()
