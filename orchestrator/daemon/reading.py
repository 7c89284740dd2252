"""What the reading listener shows: the daemon's metrics, health, and the exporters to scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.api.read_app import MetricsPage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.views import HealthView, TargetGroup
    from orchestrator.daemon.daemon import Daemon
    from orchestrator.daemon.service import Service


class Reading:
    """Implements ``api.read_app.ReadSource``."""

    def __init__(self, daemon: Daemon, service: Service) -> None:
        self._daemon = daemon
        self._service = service

    async def metrics(self, accept: str) -> MetricsPage:
        """Every metric of the daemon."""
        from prometheus_client import REGISTRY
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(accept)
        return MetricsPage(encode(REGISTRY), content_type)

    async def targets(self) -> Sequence[TargetGroup]:
        """The exporters to scrape."""
        return []

    async def health(self) -> HealthView:
        """The daemon's own state."""
        return await self._service.health()
