"""Has each tracker of each live job fed by a process that reads the job's records; nothing here waits for a tracker.

A process that fails is started again, later each time. It ends with the daemon, and the next daemon's continues from the journal,
for jobs that have ended lately as well. ``orch status JOB`` shows the journal's content.
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

from orchestrator.analysis.trackers import journal
from orchestrator.analysis.trackers.names import NETWORK, settings_of
from orchestrator.core.states import JobState
from orchestrator.daemon.jobs.tidying import read_secrets
from orchestrator.store.port import JobFilter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.spec.paths import Paths
    from orchestrator.store.port import Store

WRITER: Final = (sys.executable, "-m", "orchestrator.analysis.trackers.process")
AT_ONCE: Final = 64
PATIENCE_SECONDS: Final = 600.0
"""Time from a job's end until its tracker's process is ended."""
FIRST_DELAY_SECONDS: Final = 5.0
LONGEST_DELAY_SECONDS: Final = 600.0
TRIES_AFTER_END: Final = 5
CAUGHT_UP_SECONDS: Final = 86400.0
MOST_CAUGHT_UP: Final = 1000
TERMINAL: Final = frozenset(state.value for state in JobState if state.is_terminal)
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
        for job in await self._store.jobs(JobFilter(states=LIVE, limit=MOST_CAUGHT_UP)):
            self.changed(job)
        since = time.time() - CAUGHT_UP_SECONDS
        for job in await self._store.jobs(JobFilter(states=TERMINAL, limit=MOST_CAUGHT_UP)):
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
