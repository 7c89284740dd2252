"""Has a report written of each ended job, one after the other, in processes of low priority.

The next daemon writes the reports that an ended daemon left out: of jobs that ended in the last day and have none. A
failed report is logged and never retried by the same daemon; nothing else depends on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Final

from orchestrator.analysis import REPORT
from orchestrator.core.states import JobState
from orchestrator.store.port import JobFilter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.spec.paths import Paths
    from orchestrator.store.port import Store

WRITER: Final = (sys.executable, "-m", "orchestrator.analysis.report_process")
PATIENCE_SECONDS: Final = 1800.0
CAUGHT_UP_SECONDS: Final = 86400.0
MOST_CAUGHT_UP: Final = 200
MOST_CHARACTERS: Final = 500
TERMINAL: Final = frozenset(state.value for state in JobState if state.is_terminal)
THREADS: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


class JobReports:
    """Writes reports. ``writer`` is the command, plus a job's directory; it is killed after ``patience`` seconds."""

    def __init__(
        self,
        store: Store,
        paths: Paths,
        log: FilteringBoundLogger,
        *,
        writer: Sequence[str] = WRITER,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._store = store
        self._paths = paths
        self._log = log
        self._writer = tuple(writer)
        self._patience = patience
        self._waiting: dict[JobId, None] = {}
        self._wake = asyncio.Event()

    def ended(self, job: Job) -> None:
        """Queue the report of an ended job, unless it opted out."""
        if job.spec.report:
            self._waiting[job.id] = None
            self._wake.set()

    async def run(self) -> None:
        """Write reports until cancelled. A failed report is no failure of the daemon."""
        try:
            await self._catch_up()
        except Exception as error:
            self._log.warning("reports.not_caught_up", error=str(error))
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                job_id = next(iter(self._waiting))
                del self._waiting[job_id]
                try:
                    await self._write(job_id)
                except Exception as error:
                    self._log.warning("report.not_written", job=job_id, error=str(error))

    async def _catch_up(self) -> None:
        """Queue the jobs that ended recently and have no report."""
        ended = await self._store.jobs(JobFilter(states=TERMINAL, limit=MOST_CAUGHT_UP))
        since = time.time() - CAUGHT_UP_SECONDS
        for job in reversed(ended):
            if job.ended_at is not None and job.ended_at >= since:
                self.ended(job)

    async def _write(self, job_id: JobId) -> None:
        if not await asyncio.to_thread(_to_be_written, self._paths, job_id):
            return
        process = await asyncio.create_subprocess_exec(
            *self._writer,
            str(self._paths.job(job_id)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **THREADS},
            cwd="/",
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._patience):
                stderr = await _last_bytes(process.stderr)
                code = await process.wait()
        finally:  # an ending daemon leaves no writer behind; the next one starts the report again
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if code == 0:
            self._log.info("report.written", job=job_id)
        else:
            text = stderr.decode(errors="replace").strip().splitlines()[-1:]
            self._log.warning("report.not_written", job=job_id, exit_code=code, error="".join(text))


async def _last_bytes(stream: asyncio.StreamReader | None) -> bytes:
    """Return the end of a process's output, which is read to its end."""
    last = b""
    while stream is not None and (more := await stream.read(65536)):
        last = (last + more)[-MOST_CHARACTERS:]
    return last


def _to_be_written(paths: Paths, job_id: JobId) -> bool:
    """Whether there is something to report and no report yet; a process for each of a thousand tiny jobs costs too much."""
    if (paths.job(job_id) / REPORT).exists():
        return False
    return _holds(paths.metrics(job_id)) or any(
        _holds(path) for path in paths.job(job_id).glob("telemetry/telemetry-*.csv")
    )


def _holds(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
