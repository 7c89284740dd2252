"""Reads the progress pages of ranks on this machine, so that their actors need not send each report.

A report by way of a rank's actor wakes some ten threads of Ray; reading a page takes 40 microseconds. Only what is on the page is
read here: where steps are found in a script's output, and where secrets must be masked, the actor sends the reports.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.gangs.reports import usable
from orchestrator.runtime.nodes.directories import page_name
from orchestrator.train.script.progress_reading import PageReader

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.gang import Gang
    from orchestrator.train.script.progress import ProgressSnapshot

READ_SECONDS: Final = 1.0


class ProgressPages:
    """Reads the pages in ``directory``; None: all ranks run on other machines. ``take`` gets each new report.

    ``pause`` waits for a number of seconds.
    """

    def __init__(
        self,
        directory: Path | None,
        take: Callable[[JobId, int, int, ProgressSnapshot], None],
        log: FilteringBoundLogger,
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._directory = directory
        self._take = take
        self._log = log
        self._pause = pause

    @property
    def local(self) -> bool:
        """Whether ranks run on this machine, and use its clock."""
        return self._directory is not None

    def sees(self, job: Job) -> bool:
        """Whether the job's reports are read here."""
        return self._directory is not None and not job.spec.secrets

    def open(self, job: Job, gang: Gang, rank: int) -> None:
        """Open the page of a started rank, for ``run`` to read. Without it the rank's actor sends the reports."""
        if self._directory is None or not self.sees(job):
            return
        with contextlib.suppress(OSError):
            page = PageReader.open(self._directory / page_name(job.id, rank))
            gang.close_pages([rank])
            gang.pages[rank] = page

    async def run(self, job: Job, gang: Gang, attempt: int) -> None:
        """Read the pages of the gang's running ranks once a second, until all have ended."""
        while len(gang.gone) < job.num_workers:
            await self._pause(READ_SECONDS)
            for rank, page in list(gang.pages.items()):
                try:
                    self._look(job, gang, attempt, rank, page)
                except Exception:  # the actor sends the report again with its next reply
                    self._log.exception("gang.page_not_read", job=job.id, attempt=attempt, rank=rank)
                    gang.close_pages([rank])

    def _look(self, job: Job, gang: Gang, attempt: int, rank: int, page: PageReader) -> None:
        snapshot = usable(page.read())
        if snapshot.step is None or snapshot == gang.newest.get(rank):
            return
        gang.newest[rank] = snapshot
        self._take(job.id, attempt, rank, snapshot)
