"""What jobs recorded over time, thinned out for drawing, and where trackers have it, as the API answers it. Only the standard library is imported."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.api.view import NESTED, View

POINTS = 240
MOST_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveQuery:
    """Which part of the records: from ``since`` to ``until`` (None: as far as they go), in ``points`` parts of equal length.

    ``by_step``: over the steps instead of Unix time, also for the two bounds; then there is nothing of GPUs. ``together``: all
    GPUs in one line, and no lines of ranks.
    """

    since: float | None = None
    until: float | None = None
    points: int = POINTS
    by_step: bool = False
    together: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveView(View):
    """One line: the means of the parts in which something was recorded, in rising order of ``x``; None where it was not finite.

    ``lows`` and ``highs`` are the extremes of the same parts. ``not_finite`` counts what was recorded as not finite.
    """

    label: str
    x: tuple[float, ...]
    values: tuple[float | None, ...]
    lows: tuple[float | None, ...] = ()
    highs: tuple[float | None, ...] = ()
    not_finite: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartView(View):
    """Lines of one quantity in one unit. ``merged`` GPUs or ranks are in one line where they were too many, else 0."""

    name: str
    unit: str
    curves: tuple[CurveView, ...]
    merged: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvesView(View):
    """A job's charts. ``begin`` and ``end`` are those of all that was recorded (0: nothing was).

    ``sampled``: evenly spread samples were read, since the part asked for holds more than is read at once.
    """

    job_id: str
    begin: float = 0.0
    end: float = 0.0
    charts: tuple[ChartView, ...] = ()
    sampled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUseView(View):
    """A job that a GPU was recorded for, and from when to when."""

    gpu_uuid: str
    job_id: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHistoryView(View):
    """What GPUs did, as far as jobs recorded it: the jobs, the newest first, and charts with a line for each GPU."""

    uses: tuple[GpuUseView, ...] = ()
    begin: float = 0.0
    end: float = 0.0
    charts: tuple[ChartView, ...] = ()
    sampled: bool = False


NESTED.update(
    {
        ChartView: {"curves": CurveView},
        CurvesView: {"charts": ChartView},
        GpuHistoryView: {"charts": ChartView, "uses": GpuUseView},
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerView(View):
    """A job in one experiment tracker: ``points`` were read of its records, ``waiting`` of them are not safe there yet.

    ``where`` says where to look at the run, ``facts`` the same for programs, ``problem`` what went wrong last.
    """

    name: str
    where: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    points: int = 0
    waiting: int = 0
    problem: str = ""
    finished: bool = False
    updated_at: float | None = None
