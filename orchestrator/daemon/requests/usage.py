"""Answers queries about the use by users, queues and labels, from stored events and recorded telemetry."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.api.errors import BadRequestError
from orchestrator.api.usage_views import UsageReport, UsageRow
from orchestrator.core.goodput import Use, use_between
from orchestrator.daemon.estimates import quality
from orchestrator.store.errors import JobNotFoundError
from orchestrator.store.records import JobFilter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from orchestrator.api.service import UsageQuery
    from orchestrator.api.usage_views import EstimateQualityView
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.estimates import EstimateRecord
    from orchestrator.daemon.loop import Loop
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths
    from orchestrator.store.store import Store

PAGE: Final = 100
MAX_KEYS: Final = 4
LABEL: Final = "label:"
_HOUR: Final = 3600.0
_JOULES_PER_KWH: Final = 3.6e6


@dataclass(frozen=True, slots=True)
class Used:
    """One job's use, and its energy where it was recorded."""

    job: Job
    use: Use
    joules: float | None


class Usage:
    """Reads telemetry in threads of ``pool``. ``price`` is of a GPU hour; None: no cost is reported."""

    def __init__(
        self, loop: Loop, store: Store, paths: Paths, pool: Pool, price: float | None, estimates: EstimateRecord
    ) -> None:
        self._loop = loop
        self._store = store
        self._paths = paths
        self._pool = pool
        self._price = price
        self._estimates = estimates

    async def report(self, query: UsageQuery) -> UsageReport:
        """Return the use in a span, by the requested key. Raises BadRequestError."""
        _check(query.by)
        until = self._loop.now() if query.until is None else query.until
        since = 0.0 if query.since is None else query.since
        if since >= until:
            raise BadRequestError(
                "the span of time is empty", hint="--since is a time before --until, which is now if not given"
            )
        price = self._price if query.price is None else query.price
        groups: defaultdict[tuple[str, ...], list[Used]] = defaultdict(list)
        async for job in self._jobs(since):
            used = await self._used(job, since, until)
            if used is not None:
                groups[tuple(_key(job, name) for name in query.by)].append(used)
        rows = [_row(dict(zip(query.by, key, strict=True)), used, price) for key, used in groups.items()]
        rows.sort(key=lambda row: (-row.gpu_hours, -row.waiting_gpu_hours, tuple(row.keys.values())))
        everything = [one for used in groups.values() for one in used]
        return UsageReport(
            since=since,
            until=until,
            by=query.by,
            rows=tuple(rows),
            total=_row({}, everything, price),
            price_per_gpu_hour=price,
        )

    async def estimate_quality(self) -> EstimateQualityView:
        """Return how good estimates of the time left were."""
        return await self._pool.run(lambda: quality(self._estimates.lines()))

    async def _jobs(self, since: float) -> AsyncIterator[Job]:
        """Return every stored job that had not ended at ``since``."""
        before: int | None = None
        while page := await self._store.jobs(JobFilter(before=before, limit=PAGE)):
            for job in page:
                if job.ended_at is None or job.ended_at >= since:
                    yield job
            before = page[-1].submission.sequence
            if len(page) < PAGE:
                return

    async def _used(self, job: Job, since: float, until: float) -> Used | None:
        try:
            records = [pair async for pair in self._store.every_record(job.id)]
        except JobNotFoundError:  # pruned meanwhile
            return None
        use = use_between(records, since, until)
        if use.is_nothing:
            return None
        joules = None
        if use.held:
            joules = await self._pool.run(recorded_energy, str(self._paths.job(job.id)), since, until)
        return Used(job, use, joules)


def recorded_energy(directory: str, since: float, until: float) -> float | None:
    """Return the energy in joules that a job's telemetry has between two times; None where there is none."""
    from pathlib import Path

    import numpy as np

    from orchestrator.analysis.runs import read_telemetry
    from orchestrator.analysis.statistics import energy_curve

    try:
        gpus, _ = read_telemetry(Path(directory) / "telemetry")
    except OSError:
        return None
    curves = [curve for gpu in gpus if (curve := energy_curve(gpu)) is not None]
    if not curves:
        return None
    parts = [float(np.diff(np.interp([since, until], curve.times, curve.joules))[0]) for curve in curves]
    return sum(parts)


def _check(by: Sequence[str]) -> None:
    for name in by:
        if name not in ("user", "queue") and not (name.startswith(LABEL) and name != LABEL):
            raise BadRequestError(f"{name!r} is not a dimension of usage", hint="user, queue, or label:KEY")
    if len(set(by)) < len(by) or len(by) > MAX_KEYS:
        raise BadRequestError("use is counted by different things, at most four", hint="for example --by user,queue")


def _key(job: Job, name: str) -> str:
    match name:
        case "user":
            return job.submission.user
        case "queue":
            return job.spec.queue
        case _:
            return job.spec.labels.get(name.removeprefix(LABEL), "")


def _row(keys: Mapping[str, str], used: Sequence[Used], price: float | None) -> UsageRow:
    phases: defaultdict[str, float] = defaultdict(float)
    for one in used:
        for phase, seconds in one.use.phases.items():
            phases[phase] += seconds / _HOUR
    hours = sum(one.use.held for one in used) / _HOUR
    joules = [one.joules for one in used if one.joules is not None]
    return UsageRow(
        keys=dict(keys),
        jobs=len(used),
        gpu_hours=round(hours, 6),
        waiting_gpu_hours=round(sum(one.use.waited for one in used) / _HOUR, 6),
        phases={phase: round(value, 6) for phase, value in phases.items()},
        energy_kwh=round(sum(joules) / _JOULES_PER_KWH, 6) if joules else None,
        measured=len(joules),
        cost=None if price is None else round(hours * price, 6),
    )
