"""The output of one attempt of a rank: the read ends of its two pipes, its log, and the steps found in its lines.

Owned by the rank's actor, in its event loop's thread. Only ``close`` waits for a reader or a disk.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.ranks.logs import LogWriter
from orchestrator.runtime.ranks.output.log_progress import LogProgress
from orchestrator.train.script.progress import ProgressSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from orchestrator.runtime.forkserver.masking import Masker
    from orchestrator.runtime.ranks.logs import LogLimits

_READ_BYTES: Final = 256 * 1024


class RankOutput:
    """Writes a rank's output to its log, and finds steps in it.

    ``masker`` keeps secrets out of the log; ``progress_pattern`` is the job's `health.progress`, or empty.
    """

    def __init__(
        self, path: Path, *, masker: Masker, limits: LogLimits, progress_pattern: str, previous_step: int
    ) -> None:
        self._progress = LogProgress(progress_pattern, previous_step, lambda line: self.note([line]))
        self._log: LogWriter | None = LogWriter(path, masker=masker, limits=limits, listener=self._progress.feed)
        self._pipes: dict[int, str] = {}
        self._shown: Callable[[bytes], None] | None = None

    @property
    def lost(self) -> str | None:
        """Return why lines are missing from the log, if any are; None once it is closed."""
        return self._log.lost if self._log else None

    @property
    def lines(self) -> int:
        """Return how many lines were printed; 0 once the log is closed."""
        return self._log.lines if self._log else 0

    @property
    def tail(self) -> tuple[str, ...]:
        """Return the last lines."""
        return self._log.tail if self._log else ()

    def note(self, lines: Sequence[str]) -> None:
        """Write ``lines`` from orch into the log."""
        if self._log is not None:
            self._log.note(lines, time.time())

    def over(self, snapshot: ProgressSnapshot) -> ProgressSnapshot:
        """Return the progress, with steps found in the output where the script reports none."""
        return self._progress.over(snapshot)

    async def last_progress(self) -> ProgressSnapshot:
        """Return the last printed step, once all lines have been searched; search no later lines. A guess is left out."""
        await self._progress.close()
        return ProgressSnapshot() if self._progress.guessed else self._progress.over(ProgressSnapshot())

    def show(self, shown: Callable[[bytes], None]) -> None:
        """Call ``shown`` with all that is read from now on."""
        self._shown = shown

    def listen(self, stdout: int, stderr: int | None = None) -> None:
        """Read from these non-blocking pipes until their ends; a terminal has one for both streams."""
        loop = asyncio.get_running_loop()
        for read_end, stream in ((stdout, "o"), *(() if stderr is None else ((stderr, "e"),))):
            self._pipes[read_end] = stream
            loop.add_reader(read_end, self._read, read_end)

    def drain(self) -> None:
        """Read all that a process wrote to the pipes before it died."""
        for pipe in list(self._pipes):
            while self._take(pipe):
                pass

    async def close(self) -> None:
        """Close the pipes, then the log, once its lines have been searched."""
        for pipe in list(self._pipes):
            self._forget(pipe)
        await self._progress.close()
        if self._log is not None:
            self._log.close(time.time())
            self._log = None

    def _read(self, pipe: int) -> None:
        if self._take(pipe) is None:
            self._forget(pipe)

    def _take(self, pipe: int) -> bool | None:
        """Return whether there was something; None at the end of the file."""
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a terminal whose programs have ended
            return None
        if data and self._log is not None:
            self._log.feed(self._pipes[pipe], data, time.time())
        if data and self._shown is not None:
            self._shown(data)
        return True if data else None

    def _forget(self, pipe: int) -> None:
        asyncio.get_running_loop().remove_reader(pipe)
        del self._pipes[pipe]
        os.close(pipe)
