"""GPUs as the daemon knows them: the condition of each from all sources, the table for users, and the balance of each job's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator import clock
from orchestrator.core import events as ev
from orchestrator.core.facts.faults import (
    GpuCondition,
    GpuFailing,
    GpuFault,
    GpuLost,
    GpuSilent,
    GpuState,
    Quarantined,
    condition_of,
)
from orchestrator.core.thresholds import BALANCE_SECONDS, SETTLED_SECONDS
from orchestrator.gpu.load import balance
from orchestrator.gpu.row import GpuOwner, GpuRow, gpu_row
from orchestrator.gpu.sampler import Health
from orchestrator.runtime.deadline import within
from orchestrator.spec.paths import Paths

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.facts.faults import GpuCondition
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.gpu.load import Balance, GpuLoad
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.nodes import GpuReservations, NodeRegistry
    from orchestrator.runtime.exporters.actor import ExporterReport
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.runtime.nodes.agent import NodeGpu


def gpu_conditions(
    uuids: Collection[str],
    *,
    lost: Collection[str],
    quarantined: Mapping[str, Fact],
    reports: Mapping[str, ExporterReport],
    silent: Collection[str] = (),
) -> dict[str, GpuCondition]:
    """Return the condition of each of ``uuids``: ``lost`` ones are gone from their node, ``quarantined`` has reasons.

    ``reports`` are the newest of the exporters; a GPU without one was not queried yet, unless it is one of ``silent``,
    whose exporters did not answer.
    """
    found = {}
    for uuid in uuids:
        causes: list[GpuFault] = [GpuLost(gpu_uuid=uuid)] if uuid in lost else []
        if uuid in quarantined:
            causes.append(Quarantined(gpu_uuid=uuid, cause=quarantined[uuid]))
        if uuid not in lost and uuid in reports:
            causes += driver_faults(uuid, reports[uuid])
        elif uuid not in lost and uuid in silent:
            causes.append(GpuSilent(gpu_uuid=uuid))
        found[uuid] = condition_of(uuid, tuple(causes))
    return found


def driver_faults(uuid: str, report: ExporterReport) -> list[GpuFault]:
    """Return the driver's faults in the exporter's report. An exporter that has just started has none yet."""
    match report.status.health:
        case Health.LOST:
            return [GpuLost(gpu_uuid=uuid)]
        case Health.FAILING | Health.STALE:
            return [GpuFailing(gpu_uuid=uuid, said=report.status.error or "")]
        case _:
            return []


def known_conditions(
    nodes: NodeRegistry, exporters: Exporters, quarantined: Mapping[str, Fact], *, driver: bool
) -> dict[str, GpuCondition]:
    """Return the condition of every known GPU, without new calls; with ``driver``, by the exporters' last reports."""
    lost = {gpu.uuid for gone in nodes.lost_gpus.values() for gpu in gone} | {u for _, u in exporters.missing()}
    here = {gpu.uuid for report in nodes.reports.values() for gpu in report.gpus}
    return gpu_conditions(here | lost, lost=lost, quarantined=quarantined, reports=exporters.reports if driver else {})


class GpuReserving:
    """Reserves bad GPUs. ``jobs`` returns live jobs, ``conditions`` each GPU's, by UUID; ``refresh`` updates the nodes."""

    def __init__(
        self,
        ray: RayConnection,
        nodes: NodeRegistry,
        holds: GpuReservations,
        *,
        jobs: Callable[[], Iterable[Job]],
        conditions: Callable[[], Mapping[str, GpuCondition]],
        refresh: Callable[[], Awaitable[None]],
        log: FilteringBoundLogger,
    ) -> None:
        self._ray = ray
        self._nodes = nodes
        self._holds = holds
        self._jobs = jobs
        self._conditions = conditions
        self._refresh = refresh
        self._log = log

    async def reserve(self) -> None:
        """Keep Ray from handing out any GPU that is lost or quarantined."""
        if self._ray.connected and await self._holds.keep(self.wanted()):
            self._log.warning("gpus.held", gpus=sorted(self._holds.held))
            await self._refresh()

    def wanted(self) -> dict[str, tuple[str, NodeGpu, int]]:
        """Return, by UUID, the lost or quarantined GPUs that no gang uses: node id, GPU, number of GPUs of the node."""
        conditions = self._conditions()
        used = {u for j in self._jobs() if j.gang_open for s in j.seats for u in s.gpu_uuids}
        wanted: dict[str, tuple[str, NodeGpu, int]] = {}
        for node_id, report in self._nodes.reports.items():
            lost = self._nodes.lost_gpus.get(node_id, ())
            for gpu in (*report.gpus, *lost):
                if gpu.uuid not in used and not conditions[gpu.uuid].placeable:
                    wanted[gpu.uuid] = (node_id, gpu, len(report.gpus) + len(lost))
        return wanted


class GpuTable:
    """Queries the exporters of all GPUs on request. ``jobs`` returns the live jobs, ``clock`` seconds."""

    def __init__(
        self,
        nodes: NodeRegistry,
        exporters: Exporters,
        jobs: Callable[[], Collection[Job]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes = nodes
        self._exporters = exporters
        self._jobs = jobs
        self._clock = clock
        self._asked_at = -inf

    async def _reports(self, max_age_seconds: float) -> Mapping[str, ExporterReport]:
        """Return the exporters' last reports; those of GPUs that jobs hold are newer."""
        if self._clock() - self._asked_at < max_age_seconds:
            return dict(self._exporters.reports)
        self._asked_at = self._clock()
        return await self._exporters.ask()

    async def rows(self, quarantined: Mapping[str, Fact], max_age_seconds: float = 0.0) -> list[GpuRow]:
        """Return a row for each GPU, by node and index; ``quarantined`` has reasons by UUID.

        Exporters are queried where their last report is older than ``max_age_seconds``.
        """
        reports = await self._reports(max_age_seconds)
        holders: dict[str, list[GpuOwner]] = {}
        for job in self._jobs():
            for seat in job.seats if job.gang_open else ():
                for uuid in seat.gpu_uuids:
                    holders.setdefault(uuid, []).append(GpuOwner(job_id=job.id, rank=seat.rank))
        here = [(gpu, node) for node in self._nodes.reports.values() for gpu in node.gpus]
        gone = [(gpu, self._nodes.reports[i]) for i, lost in self._nodes.lost_gpus.items() for gpu in lost]
        conditions = gpu_conditions(
            [gpu.uuid for gpu, _ in (*here, *gone)],
            lost={gpu.uuid for gpu, _ in gone},
            quarantined=quarantined,
            reports=reports,
            silent={gpu.uuid for gpu, _ in here if not self._exporters.is_starting(gpu.uuid)} - reports.keys(),
        )
        rows = [
            _row(gpu, node.hostname, reports.get(gpu.uuid), conditions[gpu.uuid], holders.get(gpu.uuid, ()))
            for gpu, node in (*here, *gone)
        ]
        return sorted(rows, key=lambda row: (row.node, row.index, row.gpu_uuid))


def _row(
    gpu: NodeGpu, node: str, report: ExporterReport | None, condition: GpuCondition, holders: Sequence[GpuOwner]
) -> GpuRow:
    lost, cause = condition.state is GpuState.LOST, None if condition.cause is None else condition.cause.sentence()
    if report is None or lost:
        row = GpuRow(
            gpu_uuid=gpu.uuid,
            node=node,
            index=gpu.index,
            vendor="simulated" if gpu.simulated else "",
            model=gpu.model,
            simulated=gpu.simulated,
            health=Health.LOST if lost else Health.STARTING if condition.healthy else Health.FAILING,
            problem=cause,
            job_id=holders[0].job_id if holders else None,
            rank=holders[0].rank if holders else None,
            holders=tuple(holders),
        )
    else:
        status, problem = report.status, cause or report.status.error
        row = gpu_row(status.info, node, status.sample, health=status.health, problem=problem, holders=tuple(holders))
    causes = tuple(each.to_dict() for each in condition.causes)
    return replace(row, condition=condition.state.value, causes=causes)


WATCH_SECONDS: Final = 2.0
GATHER_SECONDS: Final = 0.25  # jobs that start together share a round


class GpuWatch:
    """Watches GPUs while jobs hold them. ``jobs`` returns the live jobs.

    ``reports`` are those of the last round: a GPU without one did not answer.
    """

    def __init__(
        self,
        ray: RayConnection,
        nodes: NodeRegistry,
        exporters: Exporters,
        paths: Paths,
        jobs: Callable[[], Collection[Job]],
        balances: JobBalances,
        log: FilteringBoundLogger,
    ) -> None:
        self._ray = ray
        self._exporters = exporters
        self._recording = GpuRecording(exporters, paths)
        self._simulated = SimulatedGpus(nodes)
        self._jobs = jobs
        self.balances = balances
        self._log = log
        self._woken = asyncio.Event()
        self.reports: Mapping[str, ExporterReport] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await within(WATCH_SECONDS, self._woken.wait())
                await asyncio.sleep(GATHER_SECONDS)
            self._woken.clear()
            if not self._ray.connected:
                continue
            try:
                await self.round()
            except Exception:  # telemetry must not harm a job or the daemon
                self._log.exception("gpus.round_failed")

    def observe(self, event: ev.Event) -> None:
        """Handle a written event: the start or end of a gang triggers a round, for its telemetry."""
        if isinstance(event, ev.AttemptRunning | ev.GangReleased):
            self._woken.set()

    async def round(self) -> None:
        """Query the exporter of every GPU that a job holds once."""
        holding = [job for job in self._jobs() if job.seats and job.gang_open]
        await self._simulated.assign(holding)
        held = self.balances.seconds(holding)
        asked = dict.fromkeys(self._recording.to_ask(), BALANCE_SECONDS) | held
        reports = await self._exporters.ask(asked, over=asked)
        await self._recording.settle(holding, reports)
        self.balances.judge(holding, reports)
        self.reports = reports


class JobBalances:
    """The balance of each job that holds GPUs, from its exporters' averages: ``raw`` as values, ``json_ready`` for JSON."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = clock.now) -> None:
        self._clock = clock
        self._wall = wall
        self._loads: dict[str, tuple[float, GpuLoad | None]] = {}
        """Each GPU's load as last reported, and when: one missed report makes no GPU silent."""
        self.raw: dict[JobId, Balance] = {}
        self.json_ready: dict[JobId, dict[str, Any]] = {}

    def latest(self) -> Mapping[JobId, dict[str, Any]]:
        """Return the present balances for JSON."""
        return self.json_ready

    def load_cv(self, job_id: JobId) -> float | None:
        """Return the job's wider coefficient of variation of utilization and power; None unless all its GPUs report."""
        found = self.raw.get(job_id)
        worst = found.worst if found is not None and not found.silent else None
        return worst.cv if worst is not None else None

    def seconds(self, holding: Iterable[Job]) -> dict[str, float]:
        """Return for each GPU that a job holds over how many seconds its load counts: a minute, or the job's run so far."""
        found: dict[str, float] = {}
        for job in holding:
            for uuid in _uuids(job):
                found[uuid] = min(found.get(uuid, BALANCE_SECONDS), self._running(job) or BALANCE_SECONDS)
        return found

    def judge(self, holding: Collection[Job], reports: Mapping[str, ExporterReport]) -> None:
        """Compute the balance of each job that holds GPUs, from what they did during its run, and drop all other jobs."""
        now = self._clock()
        self._loads |= {uuid: (now, report.load) for uuid, report in reports.items()}
        self._loads = {uuid: known for uuid, known in self._loads.items() if now - known[0] < BALANCE_SECONDS}
        self.raw = {
            job.id: balance({uuid: self._loads.get(uuid, (now, None))[1] for uuid in uuids})
            for job in holding
            if (uuids := _uuids(job)) and (self._running(job) or 0.0) >= SETTLED_SECONDS
        }
        self.json_ready = {job_id: found.to_json() for job_id, found in self.raw.items()}

    def _running(self, job: Job) -> float | None:
        """Return for how long the job has run; None for one that does not run yet."""
        running_at = job.attempt.running_at if job.attempt is not None else None
        return None if running_at is None else self._wall() - running_at


def _uuids(job: Job) -> list[str]:
    return [uuid for seat in job.seats for uuid in seat.gpu_uuids]


class GpuRecording:
    """Orders exporters to record samples for jobs, until their reports confirm it.

    Exporters continue to write without a daemon, and lose their orders when they end. So no order counts as done: each
    report of what an exporter records is compared with what it should record.
    """

    def __init__(self, exporters: Exporters, paths: Paths) -> None:
        self._exporters = exporters
        self._paths = paths
        self._recording_of: dict[str, frozenset[str]] = {}

    def to_ask(self) -> set[str]:
        """Return the GPUs to query although no job holds them: those that may record, and those not yet queried."""
        known = self._exporters.nodes.keys()
        for uuid in self._recording_of.keys() - known:
            del self._recording_of[uuid]
        return {uuid for uuid in known if self._recording_of.get(uuid) != frozenset()}

    async def settle(self, holding: Iterable[Job], reports: Mapping[str, ExporterReport]) -> None:
        """Make the exporters that reported record what they should and nothing else."""
        wanted: dict[str, list[Job]] = {}
        for job in holding:
            if job.spec.telemetry.record:
                for uuid in {uuid for seat in job.seats for uuid in seat.gpu_uuids}:
                    wanted.setdefault(uuid, []).append(job)
        for uuid, report in reports.items():
            if uuid not in self._exporters.nodes:
                continue
            jobs = {str(job.id): job for job in wanted.get(uuid, ())}
            # An exporter may record a job before it reports that, and a short job has ended by then.
            self._recording_of[uuid] = report.recording | jobs.keys()
            for job_id in jobs.keys() - report.recording:
                rate = jobs[job_id].spec.telemetry.rate
                await self._exporters.record(uuid, job_id, self._directory(uuid, jobs[job_id]), rate)
            if over := report.recording - jobs.keys():
                await self._exporters.stop_recording(uuid, sorted(over))

    def _directory(self, uuid: str, job: Job) -> str:
        """Return the job's telemetry directory on the GPU's node: in the daemon's home if shared, else its own."""
        node = self._exporters.nodes[uuid]
        home = self._paths.home if node.home_shared else Path(node.home)
        return str(Paths(home=home, socket=self._paths.socket).job(job.id) / "telemetry")


class SimulatedGpus:
    """Sends the agents of nodes with simulated GPUs, which have no driver, the processes on each, after each change."""

    def __init__(self, nodes: NodeRegistry) -> None:
        self._nodes = nodes
        self._assigned: dict[str, dict[int, tuple[int, ...]]] = {}

    async def assign(self, holding: Collection[Job]) -> None:
        """Send each of the nodes the processes of the jobs by GPU."""
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
                await within(10.0, agent.assign(assignment))
                self._assigned[node_id] = assignment
