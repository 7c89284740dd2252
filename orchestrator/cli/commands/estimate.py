"""`orch estimate`: how long jobs will still run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from orchestrator.api.matrix_views import MatrixView
from orchestrator.cli.commands.selecting import LIVE_STATES, job_or_matrix
from orchestrator.cli.commands.shared import Json, complete_job
from orchestrator.cli.render.jobs import STATE_STYLES
from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.cli.session import Session, answer
from orchestrator.units import clock, duration, plural, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.api.client import Client
    from orchestrator.api.usage_views import EstimateQualityView
    from orchestrator.api.views import JobView, ProgressView
    from orchestrator.cli.console import Console
    from orchestrator.gpu.row import GpuRow


MAX_GPUS = 4


class Total(NamedTuple):
    """Seconds until all jobs have ended, and bounds; None if not known."""

    seconds: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The daemon's answers for `orch estimate`; ``gpus`` are those that the jobs hold, by UUID."""

    jobs: tuple[JobView, ...]
    total: Total
    gpus: Mapping[str, GpuRow]
    quality: EstimateQualityView
    asked: str | None


def total_of(jobs: Sequence[JobView]) -> Total:
    """Return the time until the last of the running jobs has ended."""
    running = [job.progress for job in jobs if job.progress is not None and job.progress.eta_seconds is not None]
    lows, highs = [one.eta_low_seconds for one in running], [one.eta_high_seconds for one in running]
    return Total(
        max((one.eta_seconds for one in running if one.eta_seconds is not None), default=None),
        None if None in lows else max((low for low in lows if low is not None), default=None),
        None if None in highs else max((high for high in highs if high is not None), default=None),
    )


def as_json(found: Estimates) -> dict[str, Any]:
    """Return the estimates for programs: seconds, None if not known."""
    return {
        "jobs": [
            {
                "id": job.id,
                "state": job.state,
                **_progress(job),
                "why": missing_reason(job),
                "gpus": [
                    {"gpu_uuid": gpu.gpu_uuid, "rank": rank, "memory_used_bytes": gpu.memory_used_bytes}
                    for rank, gpu in _gpus(job, found.gpus)
                ],
            }
            for job in found.jobs
        ],
        "total": found.total._asdict(),
        "quality": found.quality.to_json(),
    }


def _progress(job: JobView) -> dict[str, Any]:
    progress = job.progress
    names = ("step", "total_steps", "eta_seconds", "eta_low_seconds", "eta_high_seconds")
    values = {name: None if progress is None else getattr(progress, name) for name in names}
    return {**values, "step_seconds": _step_seconds(job)}


def _step_seconds(job: JobView) -> float | None:
    rate = None if job.progress is None else job.progress.steps_per_second
    return 1.0 / rate if rate else None


def _gpus(job: JobView, gpus: Mapping[str, GpuRow]) -> list[tuple[int, GpuRow]]:
    return [(rank.rank, gpus[uuid]) for rank in job.gpus for uuid in rank.gpu_uuids if uuid in gpus]


def missing_reason(job: JobView) -> str:
    """Return why there is no estimate of a job; empty if there is one."""
    progress = job.progress
    if job.is_terminal:
        return "has ended"
    if progress is not None and progress.eta_seconds is not None:
        return ""
    if job.state != "RUNNING":
        return "does not run"
    if progress is None or progress.step is None:
        return "has reported no step; health.progress reads steps from its log"
    if progress.total_steps is None:
        return "its total of steps is not known: report(total_steps=...), or a second group in health.progress"
    return "makes no step" if progress.steps_per_second is None else "too early to tell"


def estimate_lines(console: Console, found: Estimates, now: float) -> list[str]:
    """Return the table, the total, and the accuracy of earlier estimates."""
    if not found.jobs:
        none = "no job is left to run" if found.asked else "no jobs; `orch submit job.yaml` makes one"
        return [none, quality_text(found.quality)]
    lines = render_table(console, _columns(found.gpus, now), found.jobs)
    if len(found.jobs) > 1 and found.total.seconds is not None:
        waiting = sum(job.state != "RUNNING" for job in found.jobs)
        what = "until all have ended" if found.asked else "until the last that runs has ended"
        more = f"; {waiting} not running" if waiting else ""
        lines.append(f"about {duration(found.total.seconds)} {what}{_bounds(found.total)}{more}")
    return [*lines, quality_text(found.quality)]


def _bounds(total: Total) -> str:
    return "" if total.low is None or total.high is None else f" ({duration(total.low)} to {duration(total.high)})"


def _columns(gpus: Mapping[str, GpuRow], now: float) -> tuple[Column[JobView], ...]:
    def step(progress: ProgressView) -> str:
        return "" if progress.step is None else f"{progress.step}/{progress.total_steps or '?'}"

    def left(progress: ProgressView) -> str:
        return duration(progress.eta_seconds)

    def interval(progress: ProgressView) -> str:
        if progress.eta_seconds is None:
            return ""
        low, high = progress.eta_low_seconds, progress.eta_high_seconds
        return "too early" if low is None or high is None else f"{duration(low)} to {duration(high)}"

    def end(progress: ProgressView) -> str:
        return "" if progress.eta_seconds is None else clock(now + progress.eta_seconds)

    def of(text: Callable[[ProgressView], str]) -> Callable[[JobView], str]:
        return lambda job: "" if job.progress is None else text(job.progress)

    return (
        Column("JOB", lambda job: job.id, weight=1000),
        Column("STATE", lambda job: Cell(job.state, STATE_STYLES.get(job.state, ())), weight=900),
        Column("STEP", of(step), weight=700, right=True),
        Column("STEP TIME", lambda job: duration(_step_seconds(job)), weight=500, right=True),
        Column("LEFT", of(left), weight=950, right=True, styles=("bold",)),
        Column("95 % INTERVAL", of(interval), weight=850),
        Column("ENDS", of(end), weight=600),
        Column("GPU MEMORY", lambda job: memory_text(job, gpus), weight=650, shrink=True),
        Column("", missing_reason, weight=300, shrink=True, styles=("dim",)),
    )


def memory_text(job: JobView, gpus: Mapping[str, GpuRow]) -> str:
    """Return the memory used by each rank; for many GPUs, the range."""
    used = [(rank, gpu.memory_used_bytes) for rank, gpu in _gpus(job, gpus) if gpu.memory_used_bytes is not None]
    if not used:
        return ""
    if len(used) <= MAX_GPUS:
        return ", ".join(size(count) for _, count in used)
    counts = [count for _, count in used]
    return f"{len(used)} GPUs, {size(min(counts))} to {size(max(counts))}"


def quality_text(quality: EstimateQualityView) -> str:
    """Return a sentence on how often the intervals of estimates contained the time left."""
    if not quality.checked:
        return "no estimate has been checked yet: that takes a job that succeeds"
    share = 100 * quality.within / quality.checked
    error = "" if quality.median_error is None else f"; off by {100 * quality.median_error:.1f} % (median)"
    return (
        f"so far {quality.within} of {quality.checked} intervals of {100 * quality.confidence:.0f} %"
        f" held the time that was left ({share:.0f} %; {plural(quality.jobs, 'job')}){error}"
    )


def estimate(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB|MATRIX", help="Default: every job that has not ended.", autocompletion=complete_job
        ),
    ] = None,
    *,
    json: Json = False,
) -> int:
    """Show how long jobs will still run, with a 95 % interval, their GPUs' memory, and how good estimates were.

    Uses the steps that a job reports, or that `health.progress` finds in its log; the total number of steps must be known.
    """
    session = Session()
    found = _ask(session, session.client(), name)
    return answer(session, estimate_lines(session.console, found, time.time()), as_json(found), as_json=json)


def _ask(session: Session, client: Client, name: str | None) -> Estimates:
    jobs: list[JobView]
    if name is None:
        jobs = list(client.jobs(states=list(LIVE_STATES)).jobs)
        total = total_of(jobs)
    elif isinstance(found := job_or_matrix(client, name), MatrixView):
        ids = [row.job_id for row in found.jobs if row.state in LIVE_STATES]
        jobs = [client.job(job_id) for job_id in ids]
        total = Total(found.eta_seconds, found.eta_low_seconds, found.eta_high_seconds)
    else:
        session.note_which(name, found)
        jobs, total = [found], total_of([found])
    held = {uuid for job in jobs for rank in job.gpus for uuid in rank.gpu_uuids}
    memory = {row.gpu_uuid: row for row in client.gpus() if row.gpu_uuid in held} if held else {}
    return Estimates(jobs=tuple(jobs), total=total, gpus=memory, quality=client.estimate_quality(), asked=name)
