"""Watches the GPUs that jobs hold: their loads for the balances, their jobs' telemetry, simulated GPUs.

Queries their exporters every two seconds and when a gang starts or ends. Without a held GPU it does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from orchestrator.core import events as ev
from orchestrator.daemon.gpus.recording import GpuRecording
from orchestrator.daemon.gpus.simulated import SimulatedGpus
from orchestrator.runtime.deadline import within

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.job.record import Job
    from orchestrator.daemon.gpus.balances import JobBalances
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.exporters.actor import ExporterReport
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.spec.paths import Paths

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
        uuids = {uuid for job in holding for seat in job.seats for uuid in seat.gpu_uuids}
        reports = await self._exporters.ask(uuids | self._recording.to_ask(), since=self.balances.seen)
        self.balances.take(reports)
        await self._recording.settle(holding, reports)
        self.balances.judge(holding)
        self.reports = reports
