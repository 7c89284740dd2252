"""Observes every live job every two seconds, and posts the findings that open and close.

``core/diagnosis/diagnosis.py`` decides; this module passes it observations and posts its findings. Open findings are in
the job's record with the figures of their opening, so that a restarted daemon continues with them. Figures change at every
observation: the newest ones are kept in memory only, for the views (``current``).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator import clock
from orchestrator.core import events as ev
from orchestrator.core.diagnosis.diagnosis import Diagnosis
from orchestrator.core.facts.findings import Finding
from orchestrator.daemon.diagnosis.observing import job_seen
from orchestrator.daemon.metrics import save_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.diagnosis.observation import ProcessSeen, StallSeen, StorageSeen, TerminalSeen
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.gpus.watch import GpuWatch
    from orchestrator.daemon.jobs.hangs import HangWatch
    from orchestrator.daemon.jobs.progress import JobProgress, ProgressTable
    from orchestrator.runtime.exporters.actor import ExporterReport
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.runtime.gangs.rank_rpc import GangCalls

TICK_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Senses:
    """The daemon's observations of jobs: the newest reports of their GPUs' exporters, progress, stillness.

    ``load_cv`` is a job's coefficient of variation. ``missing`` are GPUs that their node no longer lists, ``is_starting`` returns whether a GPU's exporter starts.
    """

    reports: Callable[[], Mapping[str, ExporterReport]]
    load_cv: Callable[[JobId], float | None]
    progress: Callable[[JobId], JobProgress | None]
    stall: Callable[[JobId], StallSeen | None]
    processes: Callable[[Job], Mapping[int, ProcessSeen]]
    storage: Callable[[Job], Mapping[int, StorageSeen]]
    terminals: Callable[[Job], Mapping[int, TerminalSeen]]
    missing: Callable[[], Collection[str]]
    is_starting: Callable[[str], bool]


def senses_of(gpus: GpuWatch, book: ProgressTable, hangs: HangWatch, exporters: Exporters, calls: GangCalls) -> Senses:
    """Return the senses of a daemon."""
    return Senses(
        reports=lambda: gpus.reports,
        load_cv=gpus.balances.load_cv,
        progress=book.of,
        stall=hangs.stall,
        processes=calls.processes,
        storage=calls.storage,
        terminals=calls.terminals,
        missing=lambda: {uuid for _, uuid in exporters.missing()},
        is_starting=exporters.is_starting,
    )


class FindingWatch:
    """Diagnoses each attempt. ``jobs`` returns the live jobs; ``post`` takes the events."""

    def __init__(
        self,
        senses: Senses,
        *,
        jobs: Callable[[], Collection[Job]],
        post: Callable[[Sequence[ev.Event]], None],
        log: FilteringBoundLogger,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = clock.now,
    ) -> None:
        self._senses = senses
        self._jobs = jobs
        self._post = post
        self._log = log
        self._clock = clock
        self._wall = wall
        self._known: dict[JobId, tuple[tuple[int, bool], Diagnosis]] = {}

    def current(self, job_id: JobId) -> tuple[Finding, ...]:
        """Return the job's open findings that this daemon has observed, with their newest figures."""
        known = self._known.get(job_id)
        return known[1].measured if known is not None else ()

    async def run(self) -> None:
        """Observe until cancelled."""
        while True:
            pause = TICK_SECONDS
            due = self._clock() + pause
            await asyncio.sleep(pause)
            try:
                self.tick(max(0.0, self._clock() - due))
            except Exception:  # a failed diagnosis must not harm the daemon
                self._log.exception("diagnosis.failed")

    def tick(self, late_seconds: float | None = None) -> None:
        """Observe every job once; ``late_seconds`` is how much later than due it is."""
        live = [job for job in self._jobs() if job.attempts and not job.state.is_terminal]
        for job_id in self._known.keys() - {job.id for job in live}:
            del self._known[job_id]
        if not live:
            return
        holding = [job for job in live if job.seats]
        missing = self._senses.missing()
        for job in live:
            self._diagnose(job, holding, missing, late_seconds)

    def _diagnose(
        self, job: Job, holding: Collection[Job], missing: Collection[str], late_seconds: float | None
    ) -> None:
        now, wall = self._clock(), self._wall()
        progress = self._senses.progress(job.id)
        leader = progress.leader if progress is not None and progress.attempt == job.attempt_number else None
        seen = job_seen(
            job,
            progress,
            self._senses.reports(),
            self._senses.stall(job.id),
            holding=holding,
            missing=missing,
            interval_seconds=save_interval(job, leader) if leader is not None else None,
            now=wall,
            processes=self._senses.processes(job),
            storage=self._senses.storage(job),
            terminals=self._senses.terminals(job),
            late_seconds=late_seconds,
            is_starting=self._senses.is_starting,
            load_cv=self._senses.load_cv(job.id),
        )
        changes = self._of(job, now).observe(seen, now, wall)
        attempt = job.attempt_number
        events: list[ev.Event] = [
            ev.FindingClosed(job_id=job.id, at=wall, attempt=attempt, finding=finding) for finding in changes.closed
        ]
        events += [
            ev.FindingOpened(job_id=job.id, at=wall, attempt=attempt, finding=finding) for finding in changes.opened
        ]
        for finding in changes.opened:
            self._log.warning("job.finding", job=job.id, attempt=attempt, finding=finding.kind, said=finding.sentence())
        if events:
            self._post(events)

    def _of(self, job: Job, now: float) -> Diagnosis:
        """Return the diagnosis of the attempt; an earlier one's open findings continue in it."""
        which = (job.attempt_number, job.attempt_live)
        known = self._known.get(job.id)
        if known is None or known[0] != which:
            opened = [one for one in job.findings if isinstance(one, Finding)]
            measured = () if known is None else known[1].measured
            known = self._known[job.id] = (which, Diagnosis(now, opened, measured=measured))
        return known[1]
