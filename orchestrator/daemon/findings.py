"""Observes every live job every two seconds, and posts the findings that open and close.

``core/diagnosis/diagnosis.py`` decides; this module passes it observations and posts its findings. Open findings are in
the job's record with the figures of their opening, so that a restarted daemon continues with them. Figures change at every
observation: the newest ones are kept in memory only, for the views (``current``).
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import structs

from orchestrator import clock
from orchestrator.core import events as ev
from orchestrator.core.diagnosis.diagnosis import Diagnosis
from orchestrator.core.diagnosis.health import TRAINING_PHASES
from orchestrator.core.diagnosis.observation import (
    APART,
    GpuSeen,
    JobSeen,
    RankSeen,
    RestartsSeen,
    SavesSeen,
    StorageSeen,
)
from orchestrator.core.facts.faults import GpuEcc, GpuLost, Xid
from orchestrator.core.facts.findings import Finding
from orchestrator.core.states import FailureClass, JobState
from orchestrator.daemon.gpus import driver_faults
from orchestrator.daemon.metrics import save_interval
from orchestrator.gpu.drivers.simulated import is_simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.diagnosis.observation import ProcessSeen, StallSeen, TerminalSeen
    from orchestrator.core.events import RankPlacement
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Attempt, Job
    from orchestrator.daemon.gpus import GpuWatch
    from orchestrator.daemon.jobs.hangs import HangWatch
    from orchestrator.daemon.jobs.progress import JobProgress, ProgressTable
    from orchestrator.gpu.sample import Sample
    from orchestrator.runtime.exporters.actor import ExporterReport
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.runtime.gangs.rank_rpc import GangCalls
    from orchestrator.train.script.progress_reading import CheckpointFacts, ProgressSnapshot

RETRIED_SECONDS: Final = 10.0
FAILING_SECONDS: Final = 60.0
"""A single failed save counts as two once nothing has been saved for this long after it."""


def saves_seen(
    job: Job,
    snapshots: Mapping[int, ProgressSnapshot],
    storage: Mapping[int, StorageSeen],
    interval_seconds: float | None,
    now: float,
) -> SavesSeen:
    """Return the job's saves: those that ranks write themselves, by their reports, and those of snapshots, by their actors."""
    durable = job.checkpoints.durable_at or 0.0
    failing = [*_failing(snapshots, durable), *(_settled(one, now) for one in storage.values() if one.failures)]
    worst = max(failing, key=lambda one: one.failures, default=None)
    attempt, since = job.attempt, None
    if attempt is not None and attempt.first_step_at is not None:
        since = max(job.checkpoints.at or 0.0, attempt.first_step_at)
    return SavesSeen(
        failures=_failures(worst, now) if worst is not None else 0,
        said=worst.said if worst is not None else "",
        cause=worst.cause if worst is not None else "",
        ever=job.checkpoints.at is not None,
        unsaved_seconds=None if since is None else max(0.0, now - since),
        interval_seconds=interval_seconds,
        stall_seconds=max((one.save_seconds or 0.0 for one in snapshots.values() if one.saves > 1), default=None),
        waited_seconds=max((one.checkpoint.waited_seconds for one in snapshots.values()), default=0.0),
        behind=_behind(attempt, snapshots),
    )


def _behind(attempt: Attempt | None, snapshots: Mapping[int, ProgressSnapshot]) -> tuple[int, int] | None:
    """Return the highest step of a later attempt that is below its checkpoint's, and that one.

    A recognised bar that ends below the checkpoint's step counts something else, as the steps of one epoch.
    """
    if attempt is None or attempt.number < 2 or not attempt.start_step:
        return None
    counts = [one for one in snapshots.values() if one.max_step is not None]
    if any(one.guessed and (one.total_steps or attempt.start_step) < attempt.start_step for one in counts):
        return None
    step = max((one.max_step or 0 for one in counts), default=attempt.start_step)
    return (step, attempt.start_step) if step < attempt.start_step else None


def _failing(snapshots: Mapping[int, ProgressSnapshot], durable: float) -> Iterator[StorageSeen]:
    """Yield an observation for each rank with a failed newest save of its own after which nothing was stored."""
    for snapshot in snapshots.values():
        facts: CheckpointFacts = snapshot.checkpoint
        if facts.failed_at is not None and facts.failed_at > max(durable, facts.saved_at or 0.0):
            yield StorageSeen(
                failures=max(1, facts.failed_saves),
                failing_since=facts.failed_at,
                cause=facts.failure_kind,
                said=facts.failure,
            )


def _settled(seen: StorageSeen, now: float) -> StorageSeen:
    """Count failures as one until they last: the actor tries again every two seconds, and storage may be back soon."""
    lasting = seen.failing_since is not None and now - seen.failing_since >= RETRIED_SECONDS
    return seen if lasting else structs.replace(seen, failures=1)


def _failures(worst: StorageSeen, now: float) -> int:
    lasting = worst.failing_since is not None and now - worst.failing_since >= FAILING_SECONDS
    return max(worst.failures, 2 if lasting else 1)


DATA: Final = "data_seconds"
MAX_LOSSES: Final = 8
LOOP_SECONDS: Final = 3600.0


def job_seen(
    job: Job,
    progress: JobProgress | None,
    reports: Mapping[str, ExporterReport],
    stall: StallSeen | None,
    *,
    holding: Collection[Job],
    missing: Collection[str],
    interval_seconds: float | None,
    now: float,
    processes: Mapping[int, ProcessSeen] | None = None,
    storage: Mapping[int, StorageSeen] | None = None,
    terminals: Mapping[int, TerminalSeen] | None = None,
    late_seconds: float | None = None,
    is_starting: Callable[[str], bool] = lambda _: False,
    load_cv: float | None = None,
) -> JobSeen:
    """Return the job's observation at wall time ``now``. ``reports`` are of GPUs that jobs hold; a GPU without one does not answer.

    ``holding`` are the jobs that hold GPUs, ``missing`` GPUs that their node no longer lists, ``is_starting`` returns
    whether a GPU's exporter starts. ``load_cv`` is the job's coefficient of variation, where it has one.
    """
    running = job.state is JobState.RUNNING and not job.succeeded and not job.degraded and not job.exits
    ended = {one.rank for one in job.exits}
    prompts = tuple(
        one for rank, one in sorted((terminals or {}).items()) if rank < job.num_workers and rank not in ended
    )
    if not running:
        return JobSeen(
            running=False,
            terminals=prompts if job.state is JobState.RUNNING else (),
            restarts=_restarts(job, now),
            num_ranks=job.num_workers,
            late_seconds=late_seconds,
        )
    snapshots = progress.ranks if progress is not None and progress.attempt == job.attempt_number else {}
    uuids = [uuid for seat in job.seats for uuid in seat.gpu_uuids]
    nodes = {seat.rank: seat.node_name for seat in job.seats}
    attempt = job.attempt
    began = attempt.running_at if attempt is not None and attempt.running_at is not None else now
    return JobSeen(
        ranks=tuple(rank_seen(rank, snapshot, nodes.get(rank, "")) for rank, snapshot in sorted(snapshots.items())),
        gpus=tuple(
            _without_report(uuid, seat, missing, starting=is_starting(uuid))
            if (report := reports.get(uuid)) is None
            else _gpu_seen(uuid, seat, report, _own_pids(uuid, holding), missing, (began, now))
            for seat in job.seats
            for uuid in seat.gpu_uuids
        ),
        processes=tuple(one for rank, one in sorted((processes or {}).items()) if rank < job.num_workers),
        memory_bytes=job.spec.resources.resources_per_worker.memory_bytes,
        load_cv=load_cv,
        certain_work=all(is_simulated(uuid) for uuid in uuids),
        num_ranks=job.num_workers,
        stall=stall,
        saves=saves_seen(job, snapshots, storage or {}, interval_seconds, now),
        storage=tuple(one for rank, one in sorted((storage or {}).items()) if rank < job.num_workers),
        terminals=prompts,
        late_seconds=late_seconds,
        restarts=_restarts(job, now),
    )


def rank_seen(rank: int, snapshot: ProgressSnapshot, node: str = "") -> RankSeen:
    """Return the observation of a rank on its node."""
    losses = sorted(name for name in snapshot.metrics if "loss" in name.lower())[:MAX_LOSSES]
    parts = {
        name: value for name in APART if (value := snapshot.metrics.get(name)) is not None and math.isfinite(value)
    }
    return RankSeen(
        rank=rank,
        node=node,
        steps=snapshot.steps_reported,
        step_seconds=snapshot.recent_step_seconds,
        parts=parts,
        busy_seconds=snapshot.busy_seconds,
        training=snapshot.phase in TRAINING_PHASES and snapshot.saving_since is None,
        losses={name: snapshot.metrics[name] for name in losses},
    )


def _without_report(uuid: str, seat: RankPlacement, missing: Collection[str], *, starting: bool) -> GpuSeen:
    lost = GpuLost(gpu_uuid=uuid) if uuid in missing else None
    unknown = lost is None
    return GpuSeen(
        gpu_uuid=uuid,
        rank=seat.rank,
        node=seat.node_name,
        silent=unknown and not starting,
        starting=unknown and starting,
        fault=lost,
    )


def _gpu_seen(
    uuid: str,
    seat: RankPlacement,
    report: ExporterReport,
    own: frozenset[int],
    missing: Collection[str],
    times: tuple[float, float],
) -> GpuSeen:
    """Return a GPU's observation from its report. ``times`` are the attempt's start and now, by the daemon's clock."""
    began, now = times
    lost = GpuLost(gpu_uuid=uuid) if uuid in missing else None
    status, sample = report.status, report.status.sample
    faults: list[Fact] = [*([lost] if lost else []), *driver_faults(uuid, report)]
    if sample is None:
        fault = faults[0] if faults else None
        return GpuSeen(gpu_uuid=uuid, rank=seat.rank, node=seat.node_name, model=status.info.model, fault=fault)
    faults += _events(uuid, sample, began)
    clocks = dict(sample.clocks)
    return GpuSeen(
        gpu_uuid=uuid,
        rank=seat.rank,
        node=seat.node_name,
        model=status.info.model,
        sampled_at=sample.timestamp,
        utilization=sample.utilization,
        memory_bytes=None if sample.memory_used_bytes is None else float(sample.memory_used_bytes),
        memory_total_bytes=sample.memory_total_bytes,
        clock_offset_seconds=sample.timestamp - now,
        power_watts=sample.power_watts,
        power_limit_watts=sample.power_limit_watts,
        clock_hertz=clocks.get("sm", clocks.get("graphics")),
        work=sample.memory_activity if status.info.simulated else None,
        throttle=tuple(reason.value for reason in sample.throttle_active),
        foreign_pids=tuple(line[0] for line in report.lineages if own.isdisjoint(line)),
        own_memory_bytes=_own_memory(sample, report, own),
        uncorrected=_counted(sample, "uncorrected"),
        corrected=_counted(sample, "corrected"),
        remapped=_remapped(sample),
        fault=faults[0] if faults else None,
    )


def _events(uuid: str, sample: Sample, began: float) -> list[Fact]:
    """Return the driver's events since the attempt began: the newest Xid event, and its counts of memory errors."""
    newest = max(sample.xids, key=lambda xid: xid.last_timestamp, default=None)
    if newest is not None and newest.last_timestamp >= began:
        return [Xid(gpu_uuid=uuid, number=newest.code, at=newest.last_timestamp)]
    pending = dict(sample.remapped_rows)
    if pending.get("pending") or pending.get("failure"):
        return [GpuEcc(gpu_uuid=uuid)]
    return []


def _own_pids(uuid: str, holding: Collection[Job]) -> frozenset[int]:
    """Return the processes of the ranks of the jobs that hold the GPU."""
    return frozenset(
        job.pids[seat.rank]
        for job in holding
        for seat in job.seats
        if uuid in seat.gpu_uuids and seat.rank < len(job.pids)
    )


def _own_memory(sample: Sample, report: ExporterReport, own: frozenset[int]) -> float | None:
    """Return the memory of the jobs' processes on the GPU and of visible foreign ones; None unless known for all.

    In a container the driver may list no process, or process numbers that mean nothing there.
    """
    seen = {line[0] for line in report.lineages}
    if not any(not own.isdisjoint(line) for line in report.lineages):
        return None
    used = [process.memory_bytes for process in sample.processes if process.pid in seen]
    return None if any(value is None for value in used) else float(sum(filter(None, used)))


def _counted(sample: Sample, severity: str) -> int | None:
    """Return the memory errors of this severity since the driver was loaded; where not counted, of the GPU's life."""
    counts = {scope: count for what, scope, count in sample.ecc_errors if what == severity}
    return counts.get("volatile", counts.get("aggregate"))


def _remapped(sample: Sample) -> int | None:
    rows = [count for cause, count in sample.remapped_rows if cause in ("correctable", "uncorrectable")]
    return sum(rows) if rows else None


def _restarts(job: Job, now: float) -> RestartsSeen | None:
    """Count the attempts that failed in the last hour and were followed by another, without preemptions."""
    failed = [
        attempt
        for attempt in job.attempts
        if attempt.failure is not None
        and attempt.failure.failure_class is not FailureClass.PREEMPTION
        and attempt.ended_at is not None
        and now - attempt.ended_at <= LOOP_SECONDS
    ]
    if not failed or failed[-1].failure is None:
        return None
    preemption = FailureClass.PREEMPTION.value
    return RestartsSeen(
        count=len(failed),
        seconds=max(0.0, now - failed[0].started_at),
        cause=failed[-1].failure.cause,
        total=sum(count for name, count in job.restarts.items() if name != preemption),
    )


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
