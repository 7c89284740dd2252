"""What one attempt of a rank prints: the read ends of its two pipes, its log, and the steps that are read from its lines.

Owned by the rank's host, in its event loop's thread. Nothing here waits for a reader or a disk but ``close``.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.ranks.logs import LogWriter
from orchestrator.runtime.ranks.output.log_progress import LogProgress
from orchestrator.train.script.progress_facts import ProgressSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from orchestrator.runtime.forkserver.masking import Masker
    from orchestrator.runtime.ranks.logs import LogLimits

_READ_BYTES: Final = 256 * 1024


class RankOutput:
    """Takes a rank's lines into its log, and finds steps in them.

    What ``masker`` replaces never reaches the log; ``progress_pattern`` is the job's `health.progress`, or empty.
    """

    def __init__(
        self, path: Path, *, masker: Masker, limits: LogLimits, progress_pattern: str, previous_step: int
    ) -> None:
        self._progress = LogProgress(progress_pattern, previous_step, lambda line: self.note([line]))
        self._log: LogWriter | None = LogWriter(path, masker=masker, limits=limits, listener=self._progress.feed)
        self._pipes: dict[int, str] = {}

    @property
    def lost(self) -> str | None:
        """Why lines are missing from the log, if any are; None once it is closed."""
        return self._log.lost if self._log else None

    @property
    def lines(self) -> int:
        """How many lines were printed; 0 once the log is closed."""
        return self._log.lines if self._log else 0

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines."""
        return self._log.tail if self._log else ()

    def note(self, lines: Sequence[str]) -> None:
        """Write ``lines`` of orch's own into the log."""
        if self._log is not None:
            self._log.note(lines, time.time())

    def over(self, snapshot: ProgressSnapshot) -> ProgressSnapshot:
        """The snapshot, with the steps that were read from what was printed where the script reports none itself."""
        return self._progress.over(snapshot)

    async def last_progress(self) -> ProgressSnapshot:
        """The last step that was printed, once all lines have been searched; later ones are not."""
        await self._progress.close()
        return self._progress.over(ProgressSnapshot())

    def listen(self, stdout: int, stderr: int) -> None:
        """Take what comes from these pipes, which do not block, until their ends."""
        loop = asyncio.get_running_loop()
        for read_end, stream in ((stdout, "o"), (stderr, "e")):
            self._pipes[read_end] = stream
            loop.add_reader(read_end, self._read, read_end)

    def drain(self) -> None:
        """What a process wrote before it died is in the pipes: take all of it."""
        for pipe in list(self._pipes):
            while self._take(pipe):
                pass

    async def close(self) -> None:
        """Let go of the pipes, then of the log, once its lines have been searched."""
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
        """Whether there was something; None at the end of the file."""
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        if data and self._log is not None:
            self._log.feed(self._pipes[pipe], data, time.time())
        return True if data else None

    def _forget(self, pipe: int) -> None:
        asyncio.get_running_loop().remove_reader(pipe)
        del self._pipes[pipe]
        os.close(pipe)
