"""The Ray actor around one GPU's exporter: on the GPU's node, without CPUs, restarted by Ray when it dies."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from orchestrator.gpu.drivers.inventory import open_readers
from orchestrator.gpu.drivers.simulated import FILE_NAME
from orchestrator.gpu.exporter import ExporterSettings, GpuExporter, GpuStatus, HttpSettings, is_loopback
from orchestrator.gpu.load import GpuLoad  # noqa: TC001  # msgspec reads the annotations
from orchestrator.gpu.proc import ancestors
from orchestrator.runtime import remote

NODE_ADDRESS: Final = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterAccess:
    """Access to exporters: the address and ports, the token that a reader needs, and whether processes are shown.

    ``address`` ``node`` means the node's own address in its cluster.
    """

    address: str = "127.0.0.1"
    ports: tuple[int, int] = (0, 0)
    token: str = ""
    processes: bool = False

    def http(self, node_address: str) -> HttpSettings:
        """Return the HTTP settings on a node with that address."""
        first, last = self.ports
        return HttpSettings(
            host=node_address if self.address == NODE_ADDRESS else self.address,
            port=first,
            last_port=last if first else None,
            token=self.token or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterReport:
    """Report of an exporter: its URL, its process, its GPU's present state, and the jobs for which it writes telemetry.

    ``load`` is the GPU's load over the requested seconds. ``lineages`` holds each process on the GPU with its ancestors,
    which only the node itself can read; a process that the exporter cannot see has none.
    """

    url: str
    pid: int
    status: GpuStatus
    recording: frozenset[str] = frozenset()
    load: GpuLoad | None = None
    lineages: tuple[tuple[int, ...], ...] = ()


class ExporterActor:
    """One GPU's exporter. No method calls the driver: a GPU that hangs blocks only its own sampling thread.

    No method waits: the exporter has its own threads.
    """

    def __init__(
        self, *, gpu_uuid: str, node: str, node_dir: str, simulate: int, simulated_node: str, access: ExporterAccess
    ) -> None:
        import ray.util

        readers = open_readers(
            [gpu_uuid],
            simulate=simulate,
            assignments=Path(node_dir) / FILE_NAME if simulate else None,
            node=simulated_node if simulate else None,
        )
        http = access.http(ray.util.get_node_ip_address())
        self._exporter = GpuExporter(readers, node, ExporterSettings(processes=access.processes, http=http))
        try:
            self._exporter.start()
        except OSError as error:
            # The port range is for firewalls, which do not affect loopback: there, another port is better than no exporter.
            if error.errno != errno.EADDRINUSE or not is_loopback(http.host):
                raise
            anywhere = replace(http, port=0, last_port=None)
            self._exporter = GpuExporter(readers, node, ExporterSettings(processes=access.processes, http=anywhere))
            self._exporter.start()

    async def answer(self, method: str, message: bytes) -> bytes:
        """Call a method for the daemon."""
        return await remote.answer(self, method, message)

    @remote.called
    async def report(self, over: float | None = None) -> ExporterReport:
        """Return the newest values; with ``over`` also the GPU's load over that many seconds, and its processes' lineages."""
        (status,) = self._exporter.statuses()
        processes = status.sample.processes if status.sample is not None and over is not None else ()
        return ExporterReport(
            url=self._exporter.url,
            pid=os.getpid(),
            status=status,
            recording=self._exporter.recorded_jobs(),
            load=None if over is None else self._exporter.loads(over)[0],
            lineages=tuple(line for process in processes if (line := ancestors(process.pid))),
        )

    @remote.called
    async def record(self, job_id: str, directory: str, rate: float) -> None:
        """Append this GPU's samples to the job's telemetry from now on. Idempotent."""
        self._exporter.record_job(job_id, Path(directory), rate=rate)

    @remote.called
    async def stop_recording(self, job_ids: Sequence[str]) -> None:
        """End the telemetry of these jobs."""
        for job_id in job_ids:
            self._exporter.stop_recording(job_id)
