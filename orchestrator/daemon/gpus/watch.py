"""Watches the GPUs that jobs hold: their loads for the balances, their jobs' telemetry, simulated GPUs.

Queries their exporters every two seconds and when a gang starts or ends. Without a held GPU it does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator import clock
from orchestrator.core import events as ev
from orchestrator.core.thresholds import BALANCE_SECONDS, SETTLED_SECONDS
from orchestrator.gpu.load import balance
from orchestrator.runtime.deadline import within
from orchestrator.spec.paths import Paths

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.gpu.load import Balance, GpuLoad
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.exporters.actor import ExporterReport
    from orchestrator.runtime.exporters.exporters import Exporters


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
                await within(10.0, agent.assign.remote(assignment))
                self._assigned[node_id] = assignment
