# ruff: noqa: D102 - JobService documents the methods
"""The part of the in-memory service that serves matrices and usage; see ``testing.py``."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from orchestrator.api.errors import NotFoundError
from orchestrator.api.usage_views import EstimateQualityView
from orchestrator.api.views import ActionReply

if TYPE_CHECKING:
    from orchestrator.api.matrix_views import MatrixView
    from orchestrator.api.service import ActionRequest, Caller, UsageQuery
    from orchestrator.api.usage_views import UsageReport


class FakeMatrices:
    """Serves the matrices that a test has set, and records actions on them."""

    calls: list[tuple[str, Any]]
    used: UsageReport

    @cached_property
    def matrices(self) -> dict[str, MatrixView]:
        return {}

    @cached_property
    def quality(self) -> EstimateQualityView:
        return EstimateQualityView(confidence=0.95)

    async def find_matrix(self, ref: str, caller: Caller) -> str | None:  # noqa: ARG002
        named = [found.id for found in self.matrices.values() if found.name == ref]
        return ref if ref in self.matrices else named[-1] if named else None

    async def matrix(self, matrix_id: str) -> MatrixView:
        if matrix_id not in self.matrices:
            raise NotFoundError(f"there is no matrix {matrix_id!r}")
        return self.matrices[matrix_id]

    async def usage(self, query: UsageQuery) -> UsageReport:
        self.calls.append(("usage", query))
        return self.used

    async def estimate_quality(self) -> EstimateQualityView:
        return self.quality

    async def act_on_matrix(self, matrix_id: str, request: ActionRequest, caller: Caller) -> ActionReply:
        self.calls.append((f"{request.verb} matrix", (request, caller.user)))
        found = self.matrices[matrix_id]
        ids = tuple(job.job_id for job in found.jobs)
        return ActionReply(job_id=matrix_id, state=found.state, message=f"{len(ids)} jobs", job_ids=ids)
