"""What the daemon knows of GPUs: their loads, each job's balance and why it is poor, and job telemetry on disk.

Asks the exporters of GPUs that jobs hold every two seconds, and of others only when somebody wants to see them. With no GPU
held and nobody looking it does nothing.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from orchestrator.gpu.balance import Balance, Band, GpuLoad, LoadWindow
from orchestrator.gpu.diagnosis import RankView, diagnose
from orchestrator.gpu.sampler import Health
from orchestrator.gpu.view import GpuHolder, GpuRow, balance_json, gpu_row
from orchestrator.spec.paths import Paths

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.ids import JobId
    from orchestrator.core.job import Job
    from orchestrator.runtime.cluster import Cluster
    from orchestrator.runtime.exporters import Exporters

WATCH_SECONDS: Final = 2.0
POOR_SECONDS: Final = 20.0  # how long a balance must have been poor before reasons are looked for


class GpuWatch:
    """See the module. ``jobs`` gives the live jobs."""

    def __init__(
        self,
        cluster: Cluster,
        exporters: Exporters,
        paths: Paths,
        jobs: Callable[[], Collection[Job]],
        log: FilteringBoundLogger,
    ) -> None:
        self._cluster = cluster
        self._exporters = exporters
        self._paths = paths
        self._jobs = jobs
        self._log = log
        self._window = LoadWindow()
        self._seen: dict[str, float] = {}
        self._poor_since: dict[JobId, float] = {}
        self._recording: dict[JobId, tuple[int, tuple[str, ...]]] = {}
        self._assigned: dict[str, dict[int, tuple[int, ...]]] = {}
        self.balances: dict[JobId, dict[str, Any]] = {}
        self.raw_balances: dict[JobId, Balance] = {}

    async def run(self) -> None:
        """Watch for as long as the daemon lives."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if not self._cluster.connected:
                continue
            try:
                await self.round()
            except Exception:  # telemetry never harms a job, nor the daemon
                self._log.exception("gpus.round_failed")

    async def round(self) -> None:
        """One look at every GPU that a job holds."""
        holding = [job for job in self._jobs() if job.seats and job.gang_open]
        await self._assign(holding)
        await self._record(holding)
        uuids = {uuid for job in holding for seat in job.seats for uuid in seat.gpu_uuids}
        if uuids:
            self._take(await self._exporters.ask(uuids))
        now = time.monotonic()
        for job in holding:
            self._judge(job, now)
        for job_id in self.balances.keys() - {job.id for job in holding}:
            del self.balances[job_id]
            self.raw_balances.pop(job_id, None)
            self._poor_since.pop(job_id, None)

    def _take(self, reports: Any) -> None:
        for uuid, report in reports.items():
            sample = report.status.sample
            if sample is not None and sample.timestamp != self._seen.get(uuid):
                self._seen[uuid] = sample.timestamp
                # The monotonic clock of another node says nothing here; when the sample came does.
                memory = None if sample.memory_used_bytes is None else float(sample.memory_used_bytes)
                load = GpuLoad(utilization=sample.utilization, memory=memory, power=sample.power_watts)
                self._window.add_load(uuid, time.monotonic(), load)

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
        views = []
        for seat in job.seats:
            for uuid in seat.gpu_uuids:
                report = self._exporters.reports.get(uuid)
                sample = report.status.sample if report else None
                views.append(
                    RankView(
                        rank=seat.rank,
                        gpu_uuid=uuid,
                        load=self._window.load(uuid, now),
                        throttle=sample.throttle_active if sample else (),
                        foreign_pids=_foreign(job, (p.pid for p in sample.processes)) if sample else (),
                    )
                )
        return views

    async def _assign(self, holding: Collection[Job]) -> None:
        """Tell nodes with simulated GPUs which processes run on which."""
        wanted: dict[str, dict[int, tuple[int, ...]]] = {
            node_id: {} for node_id, report in self._cluster.reports.items() if any(g.simulated for g in report.gpus)
        }
        for job in holding:
            for seat in job.seats:
                if seat.node_id in wanted and seat.rank < len(job.pids):
                    for gpu in seat.gpu_ids:
                        pids = wanted[seat.node_id].get(int(gpu), ())
                        wanted[seat.node_id][int(gpu)] = (*pids, job.pids[seat.rank])
        for node_id, assignment in wanted.items():
            agent = self._cluster.agents.get(node_id)
            if agent is not None and self._assigned.get(node_id, {}) != assignment:
                await asyncio.wait_for(agent.assign.remote(assignment), 10.0)
                self._assigned[node_id] = assignment

    async def _record(self, holding: Collection[Job]) -> None:
        """Begin the telemetry of new gangs, end that of gangs that are gone."""
        for job in holding:
            uuids = tuple(uuid for seat in job.seats for uuid in seat.gpu_uuids)
            if not job.spec.telemetry.record or not uuids or job.id in self._recording:
                continue
            for uuid in uuids:
                report = self._exporters.nodes.get(uuid)
                apart = report is not None and not report.home_shared  # then it stays on its node
                home = Path(report.home) if report is not None and apart else self._paths.home
                directory = str(Paths(home=home, socket=self._paths.socket).job(job.id) / "telemetry")
                await self._exporters.record(uuid, job.id, directory, job.spec.telemetry.rate)
            self._recording[job.id] = (job.gang, uuids)
        held = {job.id: job.gang for job in holding}
        for job_id, (gang, uuids) in list(self._recording.items()):
            if held.get(job_id) != gang:
                await self._exporters.stop_recording(uuids, job_id)
                del self._recording[job_id]

    async def rows(self) -> list[GpuRow]:
        """Every GPU of every node as it is now, for people."""
        reports = await self._exporters.ask()
        holders: dict[str, list[GpuHolder]] = {}
        for job in self._jobs():
            for seat in job.seats if job.gang_open else ():
                for uuid in seat.gpu_uuids:
                    holders.setdefault(uuid, []).append(GpuHolder(job=job.id, rank=seat.rank))
        rows = [
            _row(gpu, node.hostname, reports.get(gpu.uuid), holders.get(gpu.uuid, ()))
            for node in self._cluster.reports.values()
            for gpu in node.gpus
        ]
        return sorted(rows, key=lambda row: (row.node, row.index, row.gpu_uuid))


def _row(gpu: Any, node: str, report: Any, holders: Any) -> GpuRow:
    if report is None:
        return GpuRow(
            gpu_uuid=gpu.uuid,
            node=node,
            index=gpu.index,
            vendor="simulated" if gpu.simulated else "",
            model=gpu.model,
            simulated=gpu.simulated,
            health=Health.FAILING,
            problem="its exporter does not answer; it is restarted by itself",
            job=holders[0].job if holders else None,
            rank=holders[0].rank if holders else None,
            holders=tuple(holders),
        )
    status = report.status
    return gpu_row(status.info, node, status.sample, health=status.health, problem=status.error, holders=tuple(holders))


def _foreign(job: Job, pids: Iterable[int]) -> tuple[int, ...]:
    """Processes on the GPU that are none of the job's; only what this machine can tell."""
    own = set(job.pids)
    foreign = []
    for pid in pids:
        try:
            ancestors = {pid, *(p.pid for p in psutil.Process(pid).parents())}
        except psutil.Error:
            continue
        if not ancestors & own:
            foreign.append(pid)
    return tuple(foreign)
