"""Cache of drawn charts: its records are read once in some seconds, independent of the number of browsers."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, TypeVar

from orchestrator.api.curve_views import CurveQuery
from orchestrator.web.answers import job_address, node_address
from orchestrator.web.charts import charts_html

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from orchestrator.api.curve_views import GpuHistoryView
    from orchestrator.api.service import JobService
    from orchestrator.api.views import JobView
    from orchestrator.core.ids import JobId
    from orchestrator.web.charts import Window

T = TypeVar("T")

KEEP_SECONDS: Final = 5.0
MOST_KEPT: Final = 32


class ChartShelf:
    """Cache of charts as HTML. ``clock`` returns seconds. Charts of an ended job are kept until others replace them."""

    def __init__(self, service: JobService, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._jobs: OrderedDict[tuple[object, ...], tuple[float, str]] = OrderedDict()
        self._nodes: OrderedDict[tuple[object, ...], tuple[float, tuple[GpuHistoryView, str]]] = OrderedDict()

    async def of_job(self, job: JobView, job_id: JobId, window: Window) -> str:
        """Return the charts of a job."""

        async def draw() -> str:
            view = await self._service.curves(job_id, CurveQuery(since=window.since, until=window.until))
            ends = (view.begin, view.end)
            return charts_html(view.charts, ends, window, job_address(job_id), sampled=view.sampled)

        return await self._kept(self._jobs, (job_id, window, job.ended_at), draw, lasts=job.is_terminal)

    async def of_gpus(self, node: str, uuids: Sequence[str], chosen: str, window: Window) -> tuple[GpuHistoryView, str]:
        """Return the history of GPUs of a node, and its charts; ``chosen`` is the GPU named by the address, if any."""

        async def draw() -> tuple[GpuHistoryView, str]:
            view = await self._service.gpu_history(uuids, CurveQuery(since=window.since, until=window.until))
            ends, more = (view.begin, view.end), {"gpu": chosen} if chosen else {}
            html = charts_html(view.charts, ends, window, node_address(node), sampled=view.sampled, more=more)
            return view, html

        return await self._kept(self._nodes, (node, *uuids, window), draw, lasts=False)

    async def _kept(
        self,
        shelf: OrderedDict[tuple[object, ...], tuple[float, T]],
        key: tuple[object, ...],
        draw: Callable[[], Awaitable[T]],
        *,
        lasts: bool,
    ) -> T:
        at, found = shelf.get(key, (None, None))
        if at is not None and found is not None and (lasts or self._clock() - at < KEEP_SECONDS):
            return found
        made = await draw()
        shelf[key] = (self._clock(), made)
        shelf.move_to_end(key)
        while len(shelf) > MOST_KEPT:
            shelf.popitem(last=False)
        return made
