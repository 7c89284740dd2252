"""A rank's progress: its page in shared memory, read at most once a second, combined with steps in its output."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.private_files import make_private
from orchestrator.runtime.ranks.secrets import masked_progress
from orchestrator.train.script.progress_reading import PageReader

if TYPE_CHECKING:
    from orchestrator.runtime.forkserver.masking import Masker
    from orchestrator.runtime.ranks.output.output import RankOutput
    from orchestrator.train.script.progress import ProgressSnapshot

PROGRESS_SECONDS: Final = 1.0


class RankProgress:
    """A rank's progress. ``newest`` is the last reading, ``number`` counts news; ``output`` is the current process's.

    ``on_page``: the script reports its steps, so the page alone has all of the progress.
    """

    def __init__(self, *, seconds: float = PROGRESS_SECONDS) -> None:
        self.seconds = seconds
        self._read_at = 0.0
        self.page: PageReader | None = None
        self.output: RankOutput | None = None
        self.newest: ProgressSnapshot | None = None
        self.number = 0
        self.on_page = False
        self.highest_step = 0

    def open(self, path: str) -> None:
        """Create the page of a new process."""
        self.close()
        make_private(Path(path).parent)
        self.page = PageReader.create(path)

    def close(self) -> None:
        """Close the page of an ended attempt."""
        self.newest, self.on_page = None, False
        if self.page is not None:
            self.page.close()
            self.page = None

    def request_stop(self) -> None:
        """Ask the script to stop."""
        if self.page is not None:
            self.page.request_stop()

    @property
    def writer_pid(self) -> int | None:
        """Return the process that writes the page, if it has reported."""
        return self.page.read().writer_pid if self.page is not None else None

    def look(self, masker: Masker, *, final: bool) -> bool:
        """Read the page when due, or always with ``final``; return whether it was read."""
        now = time.monotonic()
        if self.page is None or (not final and now - self._read_at < self.seconds * 0.9):
            return False
        snapshot = masked_progress(self.page.read(), masker)
        self.on_page = snapshot.step is not None
        if self.output is not None:
            snapshot = self.output.over(snapshot)
        if snapshot != self.newest:
            self.newest, self._read_at = snapshot, now
            self.number += 1
            self.highest_step = max(self.highest_step, snapshot.max_step or 0)
        return True

    def newest_step(self) -> tuple[float, int] | None:
        """Return the rank's newest reported step and its time. Also called by the thread that watches its files."""
        page, output = self.page, self.output
        if page is None:
            return None
        progress = page.read()
        if output is not None:
            progress = output.over(progress)
        if progress.max_step is None or progress.last_step_at is None:
            return None
        return progress.last_step_at, progress.max_step
