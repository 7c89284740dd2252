"""Orders exporters to record GPUs' samples into jobs' telemetry, until their reports confirm it.

Exporters continue to write without a daemon, and lose their orders when they end. So no order counts as done: each
report of what an exporter records is compared with what it should record.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.spec.paths import Paths

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.job.record import Job
    from orchestrator.runtime.exporters.actor import ExporterReport
    from orchestrator.runtime.exporters.exporters import Exporters


class GpuRecording:
    """Orders exporters to record samples for jobs."""

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
