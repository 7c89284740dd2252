"""API views of recorded curves, downsampled for charts, and of trackers. Imports only the standard library."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.api.view import NESTED, View

POINTS = 240
MAX_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveQuery:
    """Range to read: from ``since`` to ``until`` (None: as far as they go), in ``points`` parts of equal length.

    ``by_step`` uses steps instead of Unix time, also for the two bounds; GPU charts are then left out. ``together``:
    all GPUs as one line, and no lines of ranks.
    """

    since: float | None = None
    until: float | None = None
    points: int = POINTS
    by_step: bool = False
    together: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveView(View):
    """One line: the means of the parts in which something was recorded, in rising order of ``x``; None where it was not finite.

    ``lows`` and ``highs`` are the extremes of the same parts. ``not_finite`` counts the recorded values that are not.
    """

    label: str
    x: tuple[float, ...]
    values: tuple[float | None, ...]
    lows: tuple[float | None, ...] = ()
    highs: tuple[float | None, ...] = ()
    not_finite: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartView(View):
    """Lines of one quantity in one unit. ``merged`` counts the GPUs or ranks drawn as one line if they are too many."""

    name: str
    unit: str
    curves: tuple[CurveView, ...]
    merged: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvesView(View):
    """A job's charts. ``begin`` and ``end`` are the bounds of all records (0: there are none).

    ``sampled``: only evenly spread samples were read, because the requested range has more than one request reads.
    """

    job_id: str
    begin: float = 0.0
    end: float = 0.0
    charts: tuple[ChartView, ...] = ()
    sampled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUseView(View):
    """Job for which a GPU was recorded, with the begin and end of the records."""

    gpu_uuid: str
    job_id: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHistoryView(View):
    """History of GPUs as jobs recorded it: the jobs, newest first, and charts with a line for each GPU."""

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
    """A job's run in one experiment tracker: ``points`` records were read, ``waiting`` of them not yet stored there.

    ``where`` says where to view the run, ``facts`` the same for programs, ``problem`` is the last error.
    """

    name: str
    where: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    points: int = 0
    waiting: int = 0
    problem: str = ""
    finished: bool = False
    updated_at: float | None = None
