"""Builds one observation of a job from the daemon's data about it. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis.heartbeat import TRAINING_PHASES
from orchestrator.core.diagnosis.observation import APART, GpuSeen, JobSeen, RankSeen, RestartsSeen
from orchestrator.core.facts.gpus import GpuEcc, GpuLost, Xid
from orchestrator.core.states import FailureClass, JobState
from orchestrator.daemon.diagnosis.saves_seen import saves_seen
from orchestrator.daemon.gpus.conditions import driver_faults
from orchestrator.gpu.drivers.simulated import is_simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from orchestrator.core.diagnosis.observation import ProcessSeen, StallSeen, StorageSeen, TerminalSeen
    from orchestrator.core.events import Seat
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.jobs.progress import JobProgress
    from orchestrator.gpu.sample import Sample
    from orchestrator.runtime.exporters.actor import ExporterReport
    from orchestrator.train.script.progress import ProgressSnapshot

DATA: Final = "data_seconds"
MOST_LOSSES: Final = 8
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
    losses = sorted(name for name in snapshot.metrics if "loss" in name.lower())[:MOST_LOSSES]
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


def _without_report(uuid: str, seat: Seat, missing: Collection[str], *, starting: bool) -> GpuSeen:
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
    seat: Seat,
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
