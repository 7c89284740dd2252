"""What the API answers about use. Only the standard library is imported: the command line loads this module."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.api.view import NESTED, View


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow(View):
    """The use of jobs that have the same ``keys`` (user, queue or the value of a label; "" for jobs without the label).

    GPU hours; ``phases`` with ``uncommitted`` add up to ``gpu_hours``. ``waiting_gpu_hours`` is time in the queue times the GPUs asked for.
    ``energy_kwh`` is of ``measured`` of the ``jobs``, those that recorded their GPUs. ``cost`` is None without a price.
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
    """The use between two wall times, the largest first, and the sum of all."""

    since: float
    until: float
    by: tuple[str, ...]
    rows: tuple[UsageRow, ...]
    total: UsageRow
    price_per_gpu_hour: float | None = None


NESTED[UsageReport] = {"rows": UsageRow, "total": UsageRow}
