"""What the daemon knows of GPUs: their loads, each job's balance and why it is poor, and job telemetry on disk.

Asks the exporters of GPUs that jobs hold every two seconds and when a gang starts or ends, and of others only when a
reader asks. With no GPU held and no reader it does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core import events as ev
from orchestrator.core.diagnosis.straggler import paces
from orchestrator.core.facts.codec import fact_to_dict
from orchestrator.core.facts.gpus import GpuState
from orchestrator.core.sentences import sentence
from orchestrator.daemon.gpus.conditions import gpu_conditions
from orchestrator.daemon.gpus.recording import GpuRecording
from orchestrator.gpu.balance.balance import Balance, Band, LoadWindow
from orchestrator.gpu.balance.diagnosis import RankView, diagnose
from orchestrator.gpu.balance.view import GpuOwner, GpuRow, balance_json, gpu_row
from orchestrator.gpu.sampler import Health
from orchestrator.runtime.deadline import within

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.facts.gpus import GpuCondition
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.jobs.progress import JobProgress
    from orchestrator.gpu.balance.balance import GpuLoad
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.registry import NodeRegistry
    from orchestrator.runtime.exporters.actor import ExporterReport
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.runtime.nodes.agent import NodeGpu
    from orchestrator.spec.paths import Paths
    from orchestrator.train.script.progress_facts import ProgressSnapshot

WATCH_SECONDS: Final = 2.0
GATHER_SECONDS: Final = 0.25  # jobs that start together are looked at together, and none in its first moment
POOR_SECONDS: Final = 20.0  # how long a balance must have been poor before reasons are looked for


class GpuWatch:
    """See the module. ``jobs`` gives the live jobs, ``progress`` what a job's ranks reported last."""

    def __init__(
        self,
        ray: RayConnection,
        nodes: NodeRegistry,
        exporters: Exporters,
        paths: Paths,
        jobs: Callable[[], Collection[Job]],
        progress: Callable[[JobId], JobProgress | None],
        log: FilteringBoundLogger,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._ray = ray
        self._nodes = nodes
        self._exporters = exporters
        self._recording = GpuRecording(exporters, paths)
        self._jobs = jobs
        self._progress = progress
        self._log = log
        self._window = LoadWindow()
        self._woken = asyncio.Event()
        self._seen: dict[str, float] = {}
        self._poor_since: dict[JobId, float] = {}
        self._assigned: dict[str, dict[int, tuple[int, ...]]] = {}
        self.balances: dict[JobId, dict[str, Any]] = {}
        self.raw_balances: dict[JobId, Balance] = {}

    async def run(self) -> None:
        """Watch for as long as the daemon lives."""
        while True:
            with contextlib.suppress(TimeoutError):
                await within(WATCH_SECONDS, self._woken.wait())
                await asyncio.sleep(GATHER_SECONDS)
            self._woken.clear()
            if not self._ray.connected:
                continue
            try:
                await self.round()
            except Exception:  # telemetry never harms a job, nor the daemon
                self._log.exception("gpus.round_failed")

    def observe(self, event: ev.Event) -> None:
        """An event was written: a gang that starts or ends is looked at at once, for its telemetry."""
        if isinstance(event, ev.AttemptRunning | ev.GangReleased):
            self._woken.set()

    async def round(self) -> None:
        """One look at every GPU that a job holds."""
        holding = [job for job in self._jobs() if job.seats and job.gang_open]
        await self._assign(holding)
        uuids = {uuid for job in holding for seat in job.seats for uuid in seat.gpu_uuids}
        reports = await self._exporters.ask(uuids | self._recording.to_ask(), since=self._seen)
        self._take(reports)
        await self._recording.settle(holding, reports)
        now = self._clock()
        for job in holding:
            self._judge(job, now)
        for job_id in self.balances.keys() - {job.id for job in holding}:
            del self.balances[job_id]
            self.raw_balances.pop(job_id, None)
            self._poor_since.pop(job_id, None)

    def _take(self, reports: Mapping[str, ExporterReport]) -> None:
        """Add what each GPU did since it was asked last; after a restart of the daemon, its whole last minute."""
        now = self._clock()
        for uuid, report in reports.items():
            if report.loads:
                self._seen[uuid] = report.loads[-1].timestamp
                self._window.add_points(uuid, report.loads, now)
            elif (sample := report.status.sample) is not None and sample.timestamp < self._seen.get(uuid, 0.0):
                self._seen[uuid] = sample.timestamp  # its node's clock was set back

    def _judge(self, job: Job, now: float) -> None:
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
            findings = diagnose(self._rank_views(job, now), found) if now - since >= POOR_SECONDS else ()
        self.raw_balances[job.id] = found
        self.balances[job.id] = balance_json(found, findings)

    def _rank_views(self, job: Job, now: float) -> list[RankView]:
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
                report = self._exporters.reports.get(uuid)
                sample = report.status.sample if report else None
                view = RankView(
                    rank=seat.rank,
                    gpu_uuid=uuid,
                    load=loads[uuid],
                    throttle=sample.throttle_active if sample else (),
                    foreign_pids=self._foreign(uuid, report) if report else (),
                    step_seconds=steps[seat.rank],
                    own_seconds=own[seat.rank],
                    data_seconds=parts.get(seat.rank, {}).get("data_seconds"),
                )
                views.append(view)
        return views

    def _foreign(self, uuid: str, report: ExporterReport) -> tuple[int, ...]:
        """Processes on the GPU that belong to none of the jobs that hold it."""
        own = {
            job.pids[seat.rank]
            for job in self._jobs()
            for seat in job.seats
            if uuid in seat.gpu_uuids and seat.rank < len(job.pids)
        }
        return tuple(line[0] for line in report.lineages if own.isdisjoint(line))

    async def _assign(self, holding: Collection[Job]) -> None:
        """Tell nodes with simulated GPUs which processes run on which."""
        wanted: dict[str, dict[int, tuple[int, ...]]] = {
            node_id: {} for node_id, report in self._nodes.reports.items() if any(g.simulated for g in report.gpus)
        }
        for job in holding:
            for seat in job.seats:
                if seat.node_id in wanted and seat.rank < len(job.pids):
                    for gpu in seat.gpu_ids:
                        pids = wanted[seat.node_id].get(int(gpu), ())
                        wanted[seat.node_id][int(gpu)] = (*pids, job.pids[seat.rank])
        for node_id, assignment in wanted.items():
            agent = self._nodes.agents.get(node_id)
            if agent is not None and self._assigned.get(node_id, {}) != assignment:
                await within(10.0, agent.assign.remote(assignment))
                self._assigned[node_id] = assignment

    async def rows(self, quarantined: Mapping[str, Fact]) -> list[GpuRow]:
        """Every GPU of every node as it is now, for people; ``quarantined`` says by UUID why some are held back."""
        reports = await self._exporters.ask()
        holders: dict[str, list[GpuOwner]] = {}
        for job in self._jobs():
            for seat in job.seats if job.gang_open else ():
                for uuid in seat.gpu_uuids:
                    holders.setdefault(uuid, []).append(GpuOwner(job=job.id, rank=seat.rank))
        here = [(gpu, node) for node in self._nodes.reports.values() for gpu in node.gpus]
        gone = [(gpu, self._nodes.reports[i]) for i, lost in self._nodes.lost_gpus.items() for gpu in lost]
        conditions = gpu_conditions(
            [gpu.uuid for gpu, _ in (*here, *gone)],
            lost={gpu.uuid for gpu, _ in gone},
            quarantined=quarantined,
            reports=reports,
            silent={gpu.uuid for gpu, _ in here} - reports.keys(),
        )
        rows = [
            _row(gpu, node.hostname, reports.get(gpu.uuid), conditions[gpu.uuid], holders.get(gpu.uuid, ()))
            for gpu, node in (*here, *gone)
        ]
        return sorted(rows, key=lambda row: (row.node, row.index, row.gpu_uuid))


def _row(
    gpu: NodeGpu, node: str, report: ExporterReport | None, condition: GpuCondition, holders: Sequence[GpuOwner]
) -> GpuRow:
    lost, told = condition.state is GpuState.LOST, None if condition.cause is None else sentence(condition.cause)
    if report is None or lost:
        row = GpuRow(
            gpu_uuid=gpu.uuid,
            node=node,
            index=gpu.index,
            vendor="simulated" if gpu.simulated else "",
            model=gpu.model,
            simulated=gpu.simulated,
            health=Health.LOST if lost else Health.FAILING,
            problem=told,
            job=holders[0].job if holders else None,
            rank=holders[0].rank if holders else None,
            holders=tuple(holders),
        )
    else:
        status, problem = report.status, told or report.status.error
        row = gpu_row(status.info, node, status.sample, health=status.health, problem=problem, holders=tuple(holders))
    causes = tuple(map(fact_to_dict, condition.causes))
    return replace(row, condition=condition.state.value, causes=causes)


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
