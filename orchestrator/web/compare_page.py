"""Page with several jobs side by side: their curves by step or by time, and their differences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from markupsafe import Markup

from orchestrator.api.curve_views import ChartView, CurveQuery, CurvesView, CurveView
from orchestrator.api.errors import BadRequestError, OrchError
from orchestrator.web.answers import caller_of, page
from orchestrator.web.charts import charts_html, window_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from orchestrator.api.service import JobService
    from orchestrator.api.spec_views import SpecDiff
    from orchestrator.api.views import JobView
    from orchestrator.core.ids import JobId
    from orchestrator.web.charts import Window

MAX_JOBS: Final = 8
BY: Final = ("step", "time")


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences of a job from the first one; ``problem`` says why they are unknown."""

    job_id: str
    diff: SpecDiff | None
    problem: str = ""


class CompareViews:
    """Route that compares jobs."""

    def __init__(self, service: JobService) -> None:
        self._service = service

    async def compare(self, request: Request) -> Response:
        """Show the jobs that the address names, up to eight."""
        query = request.query_params
        by = query.get("by", BY[0])
        if by not in BY:
            raise BadRequestError(f"jobs are not compared by {by[:40]!r}", hint=f"by one of {', '.join(BY)}")
        named = [name for one in query.getlist("job") for name in one.split()]
        ids = list(dict.fromkeys([await self._service.resolve(name, caller_of(request)) for name in named]))
        if len(ids) > MAX_JOBS:
            raise BadRequestError(f"{len(ids)} jobs are too many to compare at once", hint=f"name up to {MAX_JOBS}")
        window = window_of(query)
        jobs = [await self._service.job(job_id) for job_id in ids]
        html = await self._charts(jobs, ids, window, by) if ids else ""
        return page(
            request,
            "compare.html",
            title="Compare",
            here="/compare",
            jobs=jobs,
            by=by,
            choices=[(one, f"/compare?{urlencode({'job': ids, 'by': one}, doseq=True)}") for one in BY],
            charts=Markup(html),  # noqa: S704 - a template's output, escaped there
            differences=[await self._difference(ids[0], other) for other in ids[1:]],
        )

    async def _charts(self, jobs: Sequence[JobView], ids: Sequence[JobId], window: Window, by: str) -> str:
        by_step = by == "step"
        views = [await self._curves(job_id, window, by_step=by_step) for job_id in ids]
        ends = (
            min((v.begin if by_step else 0.0 for v in views if v.charts), default=0.0),
            max((v.end if by_step else v.end - v.begin for v in views), default=0.0),
        )
        charts = together([(job.id, view) for job, view in zip(jobs, views, strict=True)], from_begin=not by_step)
        kind, sampled = "step" if by_step else "span", any(view.sampled for view in views)
        more = {"job": list(ids), "by": by}
        return charts_html(charts, ends, window, "/compare", sampled=sampled, kind=kind, more=more)

    async def _curves(self, job_id: JobId, window: Window, *, by_step: bool) -> CurvesView:
        """Return a job's curves; a window in time counts from the job's first record."""
        begin = 0.0
        if not by_step and not window.is_all:
            begin = (await self._service.curves(job_id, CurveQuery(points=2, together=True))).begin
        since, until = (None if end is None else begin + end for end in (window.since, window.until))
        return await self._service.curves(job_id, CurveQuery(since=since, until=until, by_step=by_step, together=True))

    async def _difference(self, first: JobId, other: JobId) -> Difference:
        try:
            return Difference(other, await self._service.diff(first, other))
        except OrchError as error:
            return Difference(other, None, error.message)


def together(views: Sequence[tuple[str, CurvesView]], *, from_begin: bool) -> list[ChartView]:
    """Merge charts of one name, with a line for each job; ``from_begin``: times count from the job's first record."""
    found: dict[tuple[str, str], list[CurveView]] = {}
    for label, view in views:
        for chart in view.charts:
            if len(chart.curves) != 1:
                continue
            (curve,) = chart.curves
            xs = tuple(x - view.begin for x in curve.x) if from_begin else curve.x
            found.setdefault((chart.name, chart.unit), []).append(replace(curve, label=label, x=xs))
    return [ChartView(name=name, unit=unit, curves=tuple(curves)) for (name, unit), curves in found.items()]
