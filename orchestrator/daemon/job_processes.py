"""Processes that read jobs' records, of low priority: a report of each ended job, and each tracker of each live one.

Reports are written one after the other. The next daemon writes those that an ended daemon left out: of jobs that ended in the last day
and have none. A failed report is logged and never retried by the same daemon; nothing else depends on it. Nothing here waits for a
tracker. A tracker's process that fails is started again, later each time. It ends with the daemon, and the next daemon's continues from
the journal, for jobs that have ended lately as well. ``orch status JOB`` shows the journal's content.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from orchestrator.analysis import REPORT
from orchestrator.analysis.trackers import journal
from orchestrator.analysis.trackers.names import NETWORK, settings_of
from orchestrator.core.states import JobState
from orchestrator.daemon.jobs.tidying import read_secrets
from orchestrator.store.records import JobFilter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.spec.paths import Paths
    from orchestrator.store.store import Store

REPORT_WRITER: Final = (sys.executable, "-m", "orchestrator.analysis.report_process")
REPORT_SECONDS: Final = 1800.0
CAUGHT_UP_SECONDS: Final = 86400.0
MAX_REPORTED: Final = 200
MAX_CHARACTERS: Final = 500
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
        writer: Sequence[str] = REPORT_WRITER,
        patience: float = REPORT_SECONDS,
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
        ended = await self._store.jobs(JobFilter(states=TERMINAL, limit=MAX_REPORTED))
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
        last = (last + more)[-MAX_CHARACTERS:]
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


WRITER: Final = (sys.executable, "-m", "orchestrator.analysis.trackers.process")
AT_ONCE: Final = 64
PATIENCE_SECONDS: Final = 600.0
"""Time from a job's end until its tracker's process is ended."""
FIRST_DELAY_SECONDS: Final = 5.0
LONGEST_DELAY_SECONDS: Final = 600.0
TRIES_AFTER_END: Final = 5
MAX_CAUGHT_UP: Final = 1000
LIVE: Final = frozenset(state.value for state in JobState) - TERMINAL
_KEPT: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "PYTHONPYCACHEPREFIX", *NETWORK)
_QUIET: Final = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}


@dataclass(slots=True)
class Followed:
    """One job in one tracker: ``over`` is set once the job has ended, in the state ``outcome``."""

    job: Job
    tracker: str
    over: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: str = ""
    failures: int = 0

    def end(self, job: Job) -> None:
        """Record the job's end."""
        self.outcome = job.state.value
        self.over.set()


class JobTrackers:
    """Feeds trackers. ``writer`` is the command, to which a job's directory and a tracker's name are added."""

    def __init__(
        self,
        store: Store,
        paths: Paths,
        log: FilteringBoundLogger,
        *,
        writer: Sequence[str] = WRITER,
        patience: float = PATIENCE_SECONDS,
        first_delay: float = FIRST_DELAY_SECONDS,
        at_once: int = AT_ONCE,
    ) -> None:
        self._store = store
        self._paths = paths
        self._log = log
        self._writer = tuple(writer)
        self._patience = patience
        self._first_delay = first_delay
        self._room = asyncio.Semaphore(at_once)
        self._followed: dict[tuple[JobId, str], Followed] = {}
        self._secrets: dict[JobId, dict[str, str]] = {}
        self._new: asyncio.Queue[Followed] = asyncio.Queue()

    def changed(self, job: Job) -> None:
        """Handle a changed record: from a job's first attempt on, its trackers are fed."""
        if not job.spec.trackers or not job.attempts:
            return
        for tracker in job.spec.trackers:
            if (job.id, tracker) not in self._followed:
                self._begin(Followed(job, tracker))

    def ended(self, job: Job) -> None:
        """Handle a job's end: its trackers get what they do not have yet."""
        for tracker in job.spec.trackers if job.attempts else ():
            if (job.id, tracker) not in self._followed:
                self._begin(Followed(job, tracker))
            self._followed[job.id, tracker].end(job)

    def _begin(self, followed: Followed) -> None:
        # Read at once: a job's secrets are removed at its end, and its trackers may still need theirs.
        if followed.job.id not in self._secrets:
            try:
                self._secrets[followed.job.id] = read_secrets(self._paths, followed.job.id)
            except (OSError, ValueError):
                self._secrets[followed.job.id] = {}
        self._followed[followed.job.id, followed.tracker] = followed
        self._new.put_nowait(followed)

    async def run(self) -> None:
        """Feed trackers until cancelled. No failure of one is a failure of the daemon."""
        try:
            await self._catch_up()
        except Exception as error:
            self._log.warning("trackers.not_caught_up", error=str(error))
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._follow(await self._new.get()))

    async def _catch_up(self) -> None:
        """Follow the live jobs, and those that ended lately and are not all reported."""
        for job in await self._store.jobs(JobFilter(states=LIVE, limit=MAX_CAUGHT_UP)):
            self.changed(job)
        since = time.time() - CAUGHT_UP_SECONDS
        for job in await self._store.jobs(JobFilter(states=TERMINAL, limit=MAX_CAUGHT_UP)):
            if job.spec.trackers and job.ended_at is not None and job.ended_at >= since:
                self.ended(job)

    async def _follow(self, followed: Followed) -> None:
        job_id, tracker = followed.job.id, followed.tracker
        try:
            async with self._room:
                while not await self._feed(followed):
                    followed.failures += 1
                    if followed.over.is_set() and followed.failures >= TRIES_AFTER_END:
                        self._log.warning("tracker.given_up", job=job_id, tracker=tracker)
                        return
                    delay = min(LONGEST_DELAY_SECONDS, self._first_delay * 2.0 ** min(followed.failures - 1, 20))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(delay):
                            await asyncio.Event().wait()
        except Exception as error:
            self._log.warning("tracker.failed", job=job_id, tracker=tracker, error=str(error))
        finally:
            if followed.over.is_set():
                self._forget(followed)

    def _forget(self, followed: Followed) -> None:
        del self._followed[followed.job.id, followed.tracker]
        if not any(job_id == followed.job.id for job_id, _ in self._followed):
            self._secrets.pop(followed.job.id, None)

    async def _feed(self, followed: Followed) -> bool:
        """Run the process once; return whether everything is in the tracker and its job has ended."""
        job, tracker = followed.job, followed.tracker
        path = journal.path_of(self._paths.job(job.id), tracker)
        if (await asyncio.to_thread(journal.load, path)).finished:
            return True
        if not self._paths.job(job.id).is_dir():  # pruned
            return True
        process = await asyncio.create_subprocess_exec(
            *self._writer,
            str(self._paths.job(job.id)),
            tracker,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=self._environment(job, tracker),
            cwd="/",
            start_new_session=True,
        )
        try:
            code = await self._until_exit(followed, process)
        finally:
            _end(process.pid if process.returncode is None else 0)
            await process.wait()
        if code != 0:
            problem = (await asyncio.to_thread(journal.load, path)).problem
            self._log.warning("tracker.failed", job=job.id, tracker=tracker, exit_code=code, error=problem)
        return code == 0

    async def _until_exit(self, followed: Followed, process: asyncio.subprocess.Process) -> int | None:
        assert process.stdin is not None
        facts = json.dumps(_facts(followed.job, str(self._paths.home / "trackers")))
        process.stdin.write(facts.encode() + b"\n")
        over = asyncio.create_task(followed.over.wait())
        gone = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((over, gone), return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                process.stdin.write(f"end {followed.outcome}\n".encode())
                await asyncio.wait((gone,), timeout=self._patience)
            return process.returncode
        finally:
            over.cancel()
            gone.cancel()

    def _environment(self, job: Job, tracker: str) -> dict[str, str]:
        own = {name: value for name in _KEPT if (value := os.environ.get(name)) is not None}
        given = {**job.spec.env, **self._secrets.get(job.id, {})}
        return {**own, **_QUIET, **settings_of(tracker, given)}


def _end(pid: int) -> None:
    """End a process and what it has started; 0 is none."""
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _facts(job: Job, folder: str) -> dict[str, Any]:
    """Return the name of the run, and what of the job is worth comparing; neither environment nor secrets."""
    spec, cell = job.spec, job.submission.matrix
    workers = spec.resources.num_workers
    config: dict[str, Any] = {
        "entrypoint": spec.entrypoint,
        "num_workers": workers if isinstance(workers, int | str) else f"{workers.min}-{workers.max}",
        "gpus_per_worker": spec.resources.resources_per_worker.gpu,
        "queue": spec.queue,
        "user": job.submission.user,
    }
    config |= {f"trainer.{name}": value for name, value in spec.trainer.items()}
    config |= dict(cell.values) if cell is not None else {}
    return {
        "job_id": job.id,
        "name": spec.name,
        "group": spec.name if cell is None else cell.matrix_id,
        "folder": folder,
        "tags": [f"{key}={value}" for key, value in spec.labels.items()],
        "config": config,
    }
