"""The Ray actor around one GPU's exporter; on the GPU's node, zero CPUs, restarted by Ray when it dies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.gpu.assignments import FILE_NAME
from orchestrator.gpu.exporter import ExporterSettings, GpuExporter, GpuStatus
from orchestrator.gpu.inventory import open_readers

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterReport:
    """Where an exporter serves, its process, and its GPU as it is now."""

    url: str
    pid: int
    status: GpuStatus


class ExporterActor:
    """One GPU's exporter. Its methods are synchronous: the exporter runs an event loop of its own. No method asks the driver: a GPU that hangs holds up its own sampling thread and nothing else."""

    def __init__(self, *, gpu_uuid: str, node: str, node_dir: str, simulate: int, simulated_node: str) -> None:
        readers = open_readers(
            [gpu_uuid],
            simulate=simulate,
            assignments=Path(node_dir) / FILE_NAME if simulate else None,
            node=simulated_node if simulate else None,
        )
        self._exporter = GpuExporter(readers, node, ExporterSettings())
        self._exporter.start()

    def report(self) -> ExporterReport:
        """The newest values."""
        (status,) = self._exporter.statuses()
        return ExporterReport(url=self._exporter.url, pid=os.getpid(), status=status)

    def record(self, job_id: str, directory: str, rate: float) -> None:
        """Append this GPU's samples to the job's telemetry from now on; asking again changes nothing."""
        self._exporter.record_job(job_id, Path(directory), rate=rate)

    def stop_recording(self, job_ids: Sequence[str]) -> None:
        """End the telemetry of these jobs."""
        for job_id in job_ids:
            self._exporter.stop_recording(job_id)
