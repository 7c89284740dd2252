"""Draws recorded values as SVG without inline styles or scripts: lines, bands, and the values for the page's script.

A drawing is stretched to the width of its place, so texts are HTML beside it. Colours are classes; lines after
the eighth are dashed, and each value is also given in words. Charts are kept for seconds, whatever the number of browsers.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import pairwise
from math import floor, isfinite, log2, log10
from statistics import median
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode

from orchestrator import units
from orchestrator.api.curve_views import CurveQuery
from orchestrator.api.errors import BadRequestError
from orchestrator.web.answers import job_address, node_address
from orchestrator.web.rendering import render

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from orchestrator.api.curve_views import ChartView, CurveView, GpuHistoryView
    from orchestrator.api.service import JobService
    from orchestrator.api.views import JobView
    from orchestrator.core.ids import JobId

WIDTH: Final = 1000
HEIGHT: Final = 100
COLOURS: Final = 8
GAP_FACTOR: Final = 6.0
"""A line is interrupted at a gap of this many times the usual distance of its points."""

LEAST_SPAN: Final = 2.0
FROM_ZERO: Final = ("GPU", "step time")
"""Quantities whose scale begins at 0."""

SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB")
FARTHEST: Final = 1e11


@dataclass(frozen=True, slots=True)
class Window:
    """Visible part of an axis; None: up to its end."""

    since: float | None = None
    until: float | None = None

    @property
    def query(self) -> dict[str, str]:
        """Query of the address that names the window."""
        ends = {"from": self.since, "to": self.until}
        return {name: f"{value:.3f}".rstrip("0").rstrip(".") for name, value in ends.items() if value is not None}

    @property
    def is_all(self) -> bool:
        """Whether the whole axis is visible."""
        return self.since is None and self.until is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The x axis of charts: ``kind`` is time, step or span (seconds since a start)."""

    begin: float
    end: float
    kind: str = "time"

    def text_at(self, x: float) -> str:
        """Return a position on the axis as text."""
        if self.kind == "time":
            return units.clock(x)
        return units.number(round(x)) if self.kind == "step" else units.duration(x)

    def place(self, x: float) -> int:
        """Return the horizontal coordinate of ``x`` in the drawing."""
        return round(WIDTH * min(1.0, max(0.0, (x - self.begin) / max(self.end - self.begin, 1e-9))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One drawn line: its colour, its path, and its values for the script."""

    label: str
    colour: int
    dashed: bool
    path: str
    band: str
    xs: str
    values: str
    last: str
    not_finite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One chart."""

    title: str
    unit: str
    lines: Sequence[Line]
    top: str
    middle: str
    bottom: str
    description: str
    merged: int


def window_of(query: Mapping[str, str]) -> Window:
    """Return the window that an address names. Raises BadRequestError."""
    since, until = _bound(query, "from"), _bound(query, "to")
    if since is not None and until is not None and until <= since:
        raise BadRequestError(f"from {query['from']!r} is not before to {query['to']!r}")
    return Window(since, until)


def _bound(query: Mapping[str, str], name: str) -> float | None:
    text = query.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or not 0 <= value <= FARTHEST:
        raise BadRequestError(
            f"{name} {text[:40]!r} is not a time or a step", hint="write Unix time, as in from=1790000000"
        )
    return value


def axis_of(begin: float, end: float, window: Window, kind: str) -> Axis:
    """Return the axis of a window."""
    since = begin if window.since is None else window.since
    until = end if window.until is None else window.until
    return Axis(begin=since, end=max(until, since + 1e-3), kind=kind)


def charts_html(
    charts: Sequence[ChartView],
    ends: tuple[float, float],
    window: Window,
    address: str,
    *,
    sampled: bool = False,
    kind: str = "time",
    more: Mapping[str, Any] | None = None,
) -> str:
    """Return the charts with their controls. They are shown at ``address`` with the query ``more``."""
    axis = axis_of(*ends, window, kind)
    return render(
        "charts.html",
        drawings=[drawing(one, axis) for one in charts],
        axis=axis,
        window=window,
        sampled=sampled,
        links=zoom_links(ends, window, address, more or {}),
        base=_address(address, more or {}, {}),
        width=WIDTH,
        height=HEIGHT,
    )


def zoom_links(
    ends: tuple[float, float], window: Window, address: str, more: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return names and addresses of other windows."""
    axis = axis_of(*ends, window, "time")
    length = axis.end - axis.begin
    whole = max(ends[1] - ends[0], 0.0)

    def part(begin: float, end: float) -> str:
        begin, end = max(ends[0], begin), min(ends[1], end)
        return _address(address, more, Window(begin, max(end, begin + min(whole, LEAST_SPAN))).query)

    found = []
    if length > LEAST_SPAN:
        found.append(("Zoom in", part(axis.begin + length / 4, axis.end - length / 4)))
    if not window.is_all:
        found.append(("Zoom out", part(axis.begin - length / 2, axis.end + length / 2)))
        if axis.begin > ends[0]:
            found.append(("Earlier", part(axis.begin - length / 2, axis.end - length / 2)))
        if axis.end < ends[1]:
            found.append(("Later", part(axis.begin + length / 2, axis.end + length / 2)))
        found.append(("All", _address(address, more, {})))
    return found


def _address(address: str, more: Mapping[str, Any], query: Mapping[str, str]) -> str:
    text = urlencode({**more, **query}, doseq=True)
    return f"{address}?{text}#charts" if text else f"{address}#charts"


def drawing(chart: ChartView, axis: Axis) -> Drawing:
    """Draw a chart on an axis."""
    chart = _in_sizes(chart)
    low, high = _scale(chart)
    lines = [
        _line(one, number, axis, (low, high), alone=len(chart.curves) == 1) for number, one in enumerate(chart.curves)
    ]
    descriptions = "; ".join(f"{one.label}: {_in_words(curve)}" for one, curve in zip(lines, chart.curves, strict=True))
    return Drawing(
        title=chart.name,
        unit=chart.unit,
        lines=lines,
        top=units.number(high),
        middle=units.number((low + high) / 2),
        bottom=units.number(low),
        description=f"{chart.name}{f' in {chart.unit}' if chart.unit else ''}, {axis.text_at(axis.begin)} to {axis.text_at(axis.end)}. {descriptions}",
        merged=chart.merged,
    )


def _in_sizes(chart: ChartView) -> ChartView:
    """Return a metric that counts bytes, by its name, in the unit of its largest value; other charts unchanged."""
    if chart.unit or not chart.name.lower().endswith("_bytes"):
        return chart
    known = [abs(value) for curve in chart.curves for value in (*curve.values, *curve.highs) if value is not None]
    power = min(len(SIZES) - 1, int(log2(max(known)) // 10)) if known and max(known) >= 1 else 0

    def scaled(values: Sequence[float | None]) -> tuple[float | None, ...]:
        return tuple(None if value is None else value / 1024**power for value in values)

    curves = tuple(
        replace(curve, values=scaled(curve.values), lows=scaled(curve.lows), highs=scaled(curve.highs))
        for curve in chart.curves
    )
    return replace(chart, unit=SIZES[power], curves=curves)


def _scale(chart: ChartView) -> tuple[float, float]:
    if chart.unit == "%":
        return 0.0, 100.0
    shown = [value for curve in chart.curves for values in (curve.lows, curve.highs, curve.values) for value in values]
    known = [value for value in shown if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if chart.name.startswith(FROM_ZERO):
        low, high = min(low, 0.0), max(high, 0.0)
    if high <= low:
        high = low + (abs(low) or 1.0)
    return nice_scale(low, high)


def nice_scale(low: float, high: float) -> tuple[float, float]:
    """Return two ends that are round numbers, with a round middle."""
    size = 10.0 ** floor(log10((high - low) / 2))
    for step in (size * factor for factor in (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0)):
        begin = floor(low / step + 1e-9) * step
        if begin + 2 * step >= high - step * 1e-6:
            return begin, begin + 2 * step
    return low, high


def _line(curve: CurveView, number: int, axis: Axis, scale: tuple[float, float], *, alone: bool) -> Line:
    xs = [axis.place(x) for x in curve.x]
    gap = GAP_FACTOR * max(1.0, median([b - a for a, b in pairwise(xs)] or [1]))
    has_band = alone and bool(curve.lows) and any(a != b for a, b in zip(curve.lows, curve.highs, strict=True))
    last = next((value for value in reversed(curve.values) if value is not None), None)
    return Line(
        label=curve.label,
        colour=number % COLOURS,
        dashed=number >= COLOURS,
        path=_path(xs, curve.values, scale, gap),
        band=_band(xs, curve, scale, gap) if has_band else "",
        xs=" ".join(map(str, xs)),
        values="|".join(_figures(curve, place, has_band=has_band) for place in range(len(xs))),
        last=units.number(last) or "–",
        not_finite=curve.not_finite,
    )


def _figures(curve: CurveView, place: int, *, has_band: bool) -> str:
    value = curve.values[place]
    if value is None:
        return "not finite"
    if has_band and curve.lows[place] != curve.highs[place]:
        return f"{units.number(value)} ({units.number(curve.lows[place])} to {units.number(curve.highs[place])})"
    return units.number(value)


def _y(value: float, scale: tuple[float, float]) -> str:
    low, high = scale
    return f"{HEIGHT - HEIGHT * (min(max(value, low), high) - low) / (high - low):.1f}"


def _path(xs: Sequence[int], values: Sequence[float | None], scale: tuple[float, float], gap: float) -> str:
    found: list[str] = []
    before: int | None = None
    for x, value in zip(xs, values, strict=True):
        if value is None:
            before = None
            continue
        starts = before is None or x - before > gap
        found.append(f"{'M' if starts else 'L'}{x} {_y(value, scale)}" + ("h1" if starts else ""))
        before = x
    return "".join(found)


def _band(xs: Sequence[int], curve: CurveView, scale: tuple[float, float], gap: float) -> str:
    """Return the area between the extremes, one polygon for each stretch without a gap."""
    stretches: list[list[tuple[int, float, float]]] = []
    before: int | None = None
    for x, low, high in zip(xs, curve.lows, curve.highs, strict=True):
        if low is None or high is None:
            before = None
            continue
        if before is None or x - before > gap:
            stretches.append([])
        stretches[-1].append((x, low, high))
        before = x
    return "".join(
        "M"
        + "L".join(
            [f"{x} {_y(high, scale)}" for x, _, high in one] + [f"{x} {_y(low, scale)}" for x, low, _ in one[::-1]]
        )
        + "Z"
        for one in stretches
    )


def _in_words(curve: CurveView) -> str:
    known = [value for value in curve.values if value is not None]
    if not known:
        return "nothing finite"
    return f"last {units.number(known[-1])}, least {units.number(min(known))}, most {units.number(max(known))}"


T = TypeVar("T")

KEEP_SECONDS: Final = 5.0
MAX_KEPT: Final = 32


class ChartCache:
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
        while len(shelf) > MAX_KEPT:
            shelf.popitem(last=False)
        return made


LEAST: Final = 2.0
"""Minimum width: an attempt that failed at once is still visible."""


@dataclass(frozen=True, slots=True)
class Bar:
    """An attempt's place on the time line."""

    x: float
    width: float
    state: str
    label: str


def timeline(job: JobView, now: float) -> str:
    """Return the time line of the view's attempts; a table beside it shows the same. Empty without attempts."""
    if not job.attempts:
        return ""
    began = min(job.submitted_at, job.attempts[0].started_at) if len(job.attempts) == job.attempt else 0.0
    began = began or job.attempts[0].started_at
    ended = max(job.ended_at or now, job.attempts[-1].ended_at or 0.0, began + 1.0)
    scale = WIDTH / (ended - began)
    bars = [
        Bar(
            x=(one.started_at - began) * scale,
            width=max(LEAST, ((one.ended_at or ended) - one.started_at) * scale),
            state=one.state,
            label=f"attempt {one.number}: {one.state}, {units.duration((one.ended_at or ended) - one.started_at)}",
        )
        for one in job.attempts
    ]
    description = "; ".join(bar.label for bar in bars)
    return render("timeline.html", bars=bars, description=description, began=began, ended=ended, width=WIDTH, job=job)
