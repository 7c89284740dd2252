"""Content of the reading listener: the daemon's metrics, health, and the exporters to scrape."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator.api.server.read_app import MetricsPage
from orchestrator.api.views import TargetGroup
from orchestrator.telemetry.collectors import registry, render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.daemon.metrics.view_source import MetricsViewSource
    from orchestrator.daemon.readiness import Readiness
    from orchestrator.runtime.exporters.exporters import Exporters


class Reading:
    """Implements ``api.read_app.ReadSource``."""

    def __init__(self, view: MetricsViewSource, exporters: Exporters, readiness: Readiness) -> None:
        self._source = view
        self._exporters = exporters
        self._readiness = readiness

    async def metrics(self, accept: str) -> MetricsPage:
        """Return every metric of the daemon."""
        snapshot = await self._source.take()
        return MetricsPage(*await asyncio.to_thread(render, registry(lambda: snapshot), accept))

    async def targets(self) -> Sequence[TargetGroup]:
        """Return the exporter of every GPU, with its node; also those that do not answer, so that Prometheus sees them fail."""
        exporters = self._exporters
        await exporters.ask()  # an exporter restarted by Ray has another address
        return [
            TargetGroup(
                targets=(place.url.removeprefix("http://").partition("/")[0],),
                labels={"__meta_orch_node": place.node, "__meta_orch_gpu_uuid": uuid},
            )
            for uuid, place in sorted(exporters.places.items())
        ]

    async def not_ready(self) -> Sequence[str]:
        """Return why no job can be accepted and placed now."""
        return await self._readiness.problems()
