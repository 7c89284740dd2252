"""A rank's progress page in shared memory, read at most once a second and combined with steps in its output; traces requested beside it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.private_files import make_private
from orchestrator.runtime.ranks.rank_events import masked_progress
from orchestrator.train.script import profiling
from orchestrator.train.script.profiling import TraceRefusedError
from orchestrator.train.script.progress_reading import PageReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.runtime.forkserver.masking import Masker
    from orchestrator.runtime.ranks.output import RankOutput
    from orchestrator.train.script.progress_reading import ProgressSnapshot

PROGRESS_SECONDS: Final = 1.0


class RankProgress:
    """A rank's progress. ``newest`` is the last reading, ``number`` counts news; ``output`` is the current process's."""

    def __init__(self, *, seconds: float = PROGRESS_SECONDS) -> None:
        self.seconds = seconds
        self._read_at = 0.0
        self.page: PageReader | None = None
        self.output: RankOutput | None = None
        self.newest: ProgressSnapshot | None = None
        self.number = 0
        self.highest_step = 0

    def open(self, path: str) -> None:
        """Create the page of a new process."""
        self.close()
        make_private(Path(path).parent)
        self.page = PageReader.create(path)

    def close(self) -> None:
        """Close the page of an ended attempt."""
        self.newest = None
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
        if self.output is not None:
            snapshot = self.output.over(snapshot)
        if snapshot != self.newest:
            self.newest, self._read_at = snapshot, now
            self.number += 1
            self.highest_step = max(self.highest_step, snapshot.max_step or 0)
        return True

    def newest_step(self) -> tuple[float, int, bool] | None:
        """Return the time and the number of the rank's newest step, and whether it is a guess. Also called by the thread that watches its files."""
        page, output = self.page, self.output
        if page is None:
            return None
        progress = page.read()
        if output is not None:
            progress = output.over(progress)
        if progress.max_step is None or progress.last_step_at is None:
            return None
        return progress.last_step_at, progress.max_step, progress.guessed


_TRACE_POLL_SECONDS: Final = 0.05


async def take_trace(page: PageReader, rank: int, steps: int, seconds: float, over: Callable[[], bool]) -> bytes:
    """Return a trace of the next ``steps`` steps, gzipped JSON. Raises TraceRefusedError, also when ``over`` is true."""
    base = page.path
    if not profiling.listens(base, page.read().writer_pid):
        raise TraceRefusedError(
            f"rank {rank} runs no training loop of orchestrator.train, or has not reached it yet: `orch profile` needs"
            " MultiGPUTrainingManager; in a loop of your own, use torch.profiler"
        )
    profiling.request(base, steps)
    try:
        return await _wait_for(page, rank, seconds, over)
    finally:
        profiling.withdraw(base)


async def _wait_for(page: PageReader, rank: int, seconds: float, over: Callable[[], bool]) -> bytes:
    deadline = time.monotonic() + seconds
    asked = profiling.beside(page.path, profiling.REQUEST_SUFFIX)
    while True:
        ended, pending = over(), asked.exists()  # read before the trace, which the script writes first
        try:
            data = await asyncio.to_thread(profiling.collect, page.path)
        except OSError as error:
            raise TraceRefusedError(f"rank {rank} left a trace that cannot be read: {error.strerror}") from error
        if data is not None:
            return data
        if ended:
            raise TraceRefusedError(f"rank {rank} ended before the trace was complete: ask for fewer steps")
        if not pending:
            raise TraceRefusedError(
                f"rank {rank} could not write the trace: free shared memory, ask for fewer steps, or wait until a"
                " profiler of the script's own is not in use"
            )
        if time.monotonic() > deadline:
            raise TraceRefusedError(
                f"rank {rank} did not complete the steps within {seconds:g} s: ask for fewer, allow more time, or, where the"
                " script runs a profiler of its own, wait until that has ended"
            )
        await asyncio.sleep(_TRACE_POLL_SECONDS)
