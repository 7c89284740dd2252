# ruff: noqa: D102 - JobService documents the methods
"""The part of the in-memory service that serves recorded curves; see ``testing.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.api.curve_views import CurveQuery, CurvesView, GpuHistoryView

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.core.ids import JobId


class FakeCurves:
    """Serves what a test has set: curves by job, one history of all GPUs, and rows of GPUs."""

    def __init__(self) -> None:
        self.recorded: dict[str, CurvesView] = {}
        self.curve_queries: list[CurveQuery] = []
        self.history = GpuHistoryView()
        self.gpu_rows: Sequence[Mapping[str, Any]] = ()

    async def curves(self, job_id: JobId, query: CurveQuery) -> CurvesView:
        self.curve_queries.append(query)
        return self.recorded.get(job_id, CurvesView(job_id=job_id))

    async def gpu_history(self, uuids: Sequence[str], query: CurveQuery) -> GpuHistoryView:
        self.curve_queries.append(query)
        return replace(self.history, uses=tuple(use for use in self.history.uses if use.gpu_uuid in uuids))

    async def gpus(self, max_age_seconds: float = 0.0) -> Sequence[Mapping[str, Any]]:  # noqa: ARG002 - the port's signature
        return self.gpu_rows
