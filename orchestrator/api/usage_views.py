"""API views of usage and of the accuracy of estimates. Imports only the standard library: the command line loads it."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.api.view import NESTED, View


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow(View):
    """Usage of the jobs with the same ``keys`` (user, queue or the value of a label; "" for jobs without the label).

    GPU hours; ``phases`` with ``uncommitted`` add up to ``gpu_hours``. ``waiting_gpu_hours`` is time in the queue times
    the requested GPUs. ``energy_kwh`` covers the ``measured`` of the ``jobs`` that recorded their GPUs. ``cost`` is
    None without a price.
    """

    keys: dict[str, str]
    jobs: int
    gpu_hours: float
    waiting_gpu_hours: float
    phases: dict[str, float] = field(default_factory=dict)
    energy_kwh: float | None = None
    measured: int = 0
    cost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport(View):
    """Usage between two wall times, the largest first, and the sum of all."""

    since: float
    until: float
    by: tuple[str, ...]
    rows: tuple[UsageRow, ...]
    total: UsageRow
    price_per_gpu_hour: float | None = None


NESTED[UsageReport] = {"rows": UsageRow, "total": UsageRow}


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateShareView(View):
    """Estimates made when ``share`` of a job's steps were done; ``median_error`` is relative to the time that was left."""

    share: float
    checked: int
    within: int
    median_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateQualityView(View):
    """Accuracy of estimates: the intervals of ``within`` of the ``checked`` estimates contained the time of the job.

    Their share should be ``confidence``. Checked are those of ``jobs`` that succeeded in the attempt of the estimate;
    ``interrupted`` counts those of jobs that restarted, were paused, or did not succeed.
    """

    confidence: float
    jobs: int = 0
    checked: int = 0
    within: int = 0
    interrupted: int = 0
    median_error: float | None = None
    shares: tuple[EstimateShareView, ...] = ()


NESTED[EstimateQualityView] = {"shares": EstimateShareView}
