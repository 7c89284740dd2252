"""How evenly each job uses its GPUs, and why it does not, from what their exporters report.

Keeps the last minute of every GPU. Reads nothing by itself: reports are handed in.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.diagnosis.straggler import paces
from orchestrator.gpu.balance.balance import Balance, Band, LoadWindow
from orchestrator.gpu.balance.diagnosis import RankView, diagnose
from orchestrator.gpu.balance.view import balance_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.jobs.progress import JobProgress
    from orchestrator.gpu.balance.balance import GpuLoad
    from orchestrator.runtime.exporters.actor import ExporterReport
    from orchestrator.train.script.progress_facts import ProgressSnapshot

POOR_SECONDS: Final = 20.0  # how long a balance must have been poor before reasons are looked for


class JobBalances:
    """The balance of each job that holds GPUs. ``progress`` gives what a job's ranks reported last.

    ``raw`` holds the balances, ``told`` the same with their findings as JSON-ready values.
    """

    def __init__(
        self, progress: Callable[[JobId], JobProgress | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = progress
        self._clock = clock
        self._window = LoadWindow()
        self._poor_since: dict[JobId, float] = {}
        self.seen: dict[str, float] = {}
        """When each GPU's newest known sample was taken."""
        self.raw: dict[JobId, Balance] = {}
        self.told: dict[JobId, dict[str, Any]] = {}

    def take(self, reports: Mapping[str, ExporterReport]) -> None:
        """Add what each GPU did since it was asked last; after a restart of the daemon, its whole last minute."""
        now = self._clock()
        for uuid, report in reports.items():
            if report.loads:
                self.seen[uuid] = report.loads[-1].timestamp
                self._window.add_points(uuid, report.loads, now)
            elif (sample := report.status.sample) is not None and sample.timestamp < self.seen.get(uuid, 0.0):
                self.seen[uuid] = sample.timestamp  # its node's clock was set back

    def judge(self, holding: Collection[Job], reports: Mapping[str, ExporterReport]) -> None:
        """Judge the jobs that hold GPUs, and forget all others. ``reports`` has the newest of every GPU."""
        now = self._clock()
        for job in holding:
            self._judge(job, now, holding, reports)
        for job_id in self.told.keys() - {job.id for job in holding}:
            del self.told[job_id]
            self.raw.pop(job_id, None)
            self._poor_since.pop(job_id, None)

    def _judge(self, job: Job, now: float, holding: Collection[Job], reports: Mapping[str, ExporterReport]) -> None:
        uuids = [uuid for seat in job.seats for uuid in seat.gpu_uuids]
        if not uuids:
            return
        found = self._window.balance(uuids, now)
        worst = found.worst
        poor = worst is not None and worst.band is Band.POOR
        if not poor and not found.silent:
            self._poor_since.pop(job.id, None)
            findings: tuple[Any, ...] = ()
        else:
            since = self._poor_since.setdefault(job.id, now)
            findings = ()
            if now - since >= POOR_SECONDS:
                findings = diagnose(self._rank_views(job, now, holding, reports), found)
        self.raw[job.id] = found
        self.told[job.id] = balance_json(found, findings)

    def _rank_views(
        self, job: Job, now: float, holding: Collection[Job], reports: Mapping[str, ExporterReport]
    ) -> list[RankView]:
        progress = self._progress(job.id)
        told = progress.ranks if progress is not None and progress.attempt == job.attempt_number else {}
        loads = {uuid: self._window.load(uuid, now) for seat in job.seats for uuid in seat.gpu_uuids}
        steps = {seat.rank: _step_seconds(told.get(seat.rank)) for seat in job.seats}
        parts = {rank: snapshot.metrics for rank, snapshot in told.items()}
        worked = {
            seat.rank: _worked(told.get(seat.rank), steps[seat.rank], [loads[uuid] for uuid in seat.gpu_uuids])
            for seat in job.seats
        }
        own = {pace.rank: pace.own_seconds for pace in paces(steps, parts, worked)}
        views = []
        for seat in job.seats:
            for uuid in seat.gpu_uuids:
                report = reports.get(uuid)
                sample = report.status.sample if report else None
                view = RankView(
                    rank=seat.rank,
                    gpu_uuid=uuid,
                    load=loads[uuid],
                    throttle=sample.throttle_active if sample else (),
                    foreign_pids=_foreign(uuid, report, holding) if report else (),
                    step_seconds=steps[seat.rank],
                    own_seconds=own[seat.rank],
                    data_seconds=parts.get(seat.rank, {}).get("data_seconds"),
                )
                views.append(view)
        return views


def _foreign(uuid: str, report: ExporterReport, holding: Collection[Job]) -> tuple[int, ...]:
    """Processes on the GPU that belong to none of the jobs that hold it."""
    own = {
        job.pids[seat.rank]
        for job in holding
        for seat in job.seats
        if uuid in seat.gpu_uuids and seat.rank < len(job.pids)
    }
    return tuple(line[0] for line in report.lineages if own.isdisjoint(line))


def _step_seconds(told: ProgressSnapshot | None) -> float | None:
    """A rank's time for a step: from one report of a step to the next, else as the script measures it."""
    if told is None:
        return None
    return median(told.recent_step_seconds) if told.recent_step_seconds else told.metrics.get("step_seconds")


def _worked(told: ProgressSnapshot | None, step: float | None, loads: Collection[GpuLoad | None]) -> float | None:
    """Seconds of a step in which a rank worked and did not wait, where its GPU is simulated.

    A thread that waits for a real GPU keeps its processor busy: there its time says nothing.
    """
    shares = [load.work for load in loads if load is not None and load.work is not None]
    if not shares:
        return None
    if told is not None and told.busy_seconds is not None:
        return told.busy_seconds
    return None if step is None else step * max(shares)
