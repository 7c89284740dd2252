"""Routes of usage reports and of the quality of estimates, which every user may read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Query

from orchestrator.api.protocol import API_PREFIX
from orchestrator.api.service import UsageQuery
from orchestrator.api.usage_views import EstimateQualityView, UsageReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI
    from fastapi.responses import Response

    from orchestrator.api.service import JobService
    from orchestrator.api.view import View

LATEST = 1e11
Moment = Annotated[float | None, Query(ge=0, le=LATEST, allow_inf_nan=False)]


def add_usage_routes(app: FastAPI, service: JobService, answer: Callable[[View], Response]) -> None:
    """Add the routes."""

    @app.get(f"{API_PREFIX}/usage", response_model=UsageReport)
    async def usage(
        by: Annotated[list[Annotated[str, Query(max_length=80)]] | None, Query(max_length=8)] = None,
        since: Moment = None,
        until: Moment = None,
        price: Annotated[float | None, Query(ge=0, le=1e9, allow_inf_nan=False)] = None,
    ) -> Response:
        """Return GPU hours by phase, waiting, energy and cost between two times, by `user`, `queue` or `label:KEY`."""
        query = UsageQuery(by=tuple(by or ("user",)), since=since, until=until, price=price)
        return answer(await service.usage(query))

    @app.get(f"{API_PREFIX}/estimates", response_model=EstimateQualityView)
    async def estimates() -> Response:
        """Return how often the intervals of estimates of time left contained the actual time."""
        return answer(await service.estimate_quality())
