"""Collects the metrics view from the daemon's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.daemon.gpus.conditions import known_conditions
from orchestrator.daemon.nodes.queries import gpu_states

if TYPE_CHECKING:
    from orchestrator.daemon.gpus.balances import JobBalances
    from orchestrator.daemon.jobs.hangs import HangWatch
    from orchestrator.daemon.jobs.progress import ProgressTable
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.metrics.metering import Metering
    from orchestrator.daemon.nodes.quarantine import NodeQuarantine
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.store.port import Store
    from orchestrator.telemetry.metrics_view import Snapshot


class MetricsViewSource:
    """Collector of the metrics view; changes nothing."""

    def __init__(
        self,
        metering: Metering,
        *,
        loop: Loop,
        store: Store,
        book: ProgressTable,
        balances: JobBalances,
        hangs: HangWatch,
        known: NodeRegistry,
        exporters: Exporters,
        quarantine: NodeQuarantine,
    ) -> None:
        self._metering = metering
        self._loop = loop
        self._store = store
        self._book = book
        self._balances = balances
        self._hangs = hangs
        self._known = known
        self._exporters = exporters
        self._quarantine = quarantine

    async def take(self) -> Snapshot:
        """Return the present metrics view."""
        jobs = self._loop.jobs
        begun = jobs.begun.values()
        conditions = known_conditions(self._known, self._exporters, self._quarantine.quarantined_gpus, driver=True)
        return self._metering.view(
            live=jobs.values(),
            nodes=list(self._loop.nodes.values()),
            finished=await self._store.finished_counts(),
            progress=self._book.all(),
            balances=self._balances.raw,
            gpu_states=gpu_states(begun, self._known.reports, self._exporters, self._quarantine.cordoned, conditions),
            hang_suspected=self._hangs.suspected,
        )
