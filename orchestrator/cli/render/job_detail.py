"""Full view of one job: its activity, ranks, failures with advice, durations of phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.cli.console import clean
from orchestrator.cli.render.gpu_view import BAND_STYLES, balance_line, finding_lines
from orchestrator.cli.render.job_table import STATE_STYLES, progress_text, state_text
from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.spec.units import format_memory
from orchestrator.units import age, clock, duration, metric, number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.api.views import FailureView, JobView, RankView
    from orchestrator.cli.console import Console

LABEL_WIDTH = 14
MAX_METRICS = 12
QUANTITIES = ("utilization", "memory", "power")
_SPEED = {
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "joules_per_sample": "J/sample",
    "mfu": "",
}
MAX_ATTEMPTS = 10
MAX_RANKS = 16


def detail_lines(console: Console, job: JobView, now: float, place: str = "") -> list[str]:
    """Return the lines of the job; ``place`` is the place in the queue of a job that waits."""
    lines = [
        f"{console.style(job.id, 'bold')}  {console.style(state_text(job), *STATE_STYLES.get(job.state, ()))}"
        + (f"  {clean(job.reason)}" if job.reason else "")
    ]
    for label, text in _facts(console, job, now, place):
        if text:
            lines.append(f"  {console.style(label.ljust(LABEL_WIDTH), 'dim')}{text}")
    if job.failure is not None and job.state == "FAILED":
        lines += ["", *_failure(console, job.failure)]
    if job.gpus:
        lines += ["", *_ranks(console, job)]
    if len(job.attempts) > 1:
        lines += ["", *_attempts(console, job)]
    return lines


SILENT_SECONDS = 30.0
"""A job that has run for this time and has reported no step is shown with advice."""


def _facts(console: Console, job: JobView, now: float, place: str) -> list[tuple[str, str]]:
    workers = _workers(job)
    wants = ", ".join(f"{name} {_wanted(name, value)}" for name, value in job.per_worker.items() if value is not None)
    return [
        ("progress", _progress(console, job) or _unknown_progress(job, now)),
        ("speed", _speed(job)),
        ("metrics", _metrics(job)),
        ("balance", _balance(console, job)),
        *(("" if line else "findings", text) for line, text in enumerate(_findings(console, job, now))),
        ("still", "" if job.findings else console.style(clean(job.stall), "yellow") if job.stall else ""),
        ("ranks", f"{workers}, each {wants}" if wants else workers),
        ("advice", advice_text(job)),
        ("queue", f"{job.queue}, priority {job.priority}, {clean(job.user)}" + (f", {place}" if place else "")),
        ("after", ", ".join(f"{other} ({on})" for other, on in job.depends_on.items())),
        ("submitted", f"{clock(job.submitted_at)} ({age(now - job.submitted_at)} ago)"),
        ("started", clock(job.started_at)),
        ("ended", _ended(job)),
        ("restarts", _restarts(job)),
        ("last failure", _last_failure(job)),
        ("checkpoint", _checkpoint(job)),
        ("quarantined", ", ".join(clean(path) for path in job.quarantined)),
        ("timings", _timings(job)),
        ("labels", ", ".join(f"{clean(key)}={clean(value)}" for key, value in job.labels.items())),
        ("works in", clean(job.working_dir)),
        ("logs", clean(job.log_dir)),
        ("outputs", clean(job.outputs_dir)),
        ("report", clean(job.report)),
        *(("" if line else "trackers", text) for line, text in enumerate(_trackers(console, job))),
    ]


def _trackers(console: Console, job: JobView) -> list[str]:
    """Return, for each tracker, where it has the job, how many points, and the error if any."""
    lines = []
    for tracker in job.trackers:
        waiting = f", {tracker.waiting} on their way" if tracker.waiting else ""
        points = f" ({tracker.points} point{'' if tracker.points == 1 else 's'}{waiting})"
        lines.append(f"{clean(tracker.name)}: " + (f"{clean(tracker.where)}{points}" if tracker.where else "not begun"))
        if tracker.problem:
            lines.append(console.style(f"{clean(tracker.name)} failed: {clean(tracker.problem)}", "yellow"))
    return lines


def _workers(job: JobView) -> str:
    """Return the number of ranks; for an elastic job, with its bounds."""
    bounds = job.resources.get("num_workers")
    if isinstance(bounds, dict):
        return f"{job.num_workers} of {bounds.get('min')}-{bounds.get('max')} ranks"
    return f"{job.num_workers} rank" + ("" if job.num_workers == 1 else "s")


def advice_text(job: JobView) -> str:
    """Return why a job with num_workers: auto has its number of ranks; empty for other jobs."""
    if job.resources.get("num_workers") != "auto":
        return ""
    auto = job.resources.get("auto")
    limits = f", within {auto.get('min')} to {auto.get('max')}" if isinstance(auto, dict) else ""
    advice = auto.get("advice") if isinstance(auto, dict) else None
    if not isinstance(advice, dict):
        return f"none (`orch submit --advise` asks for it): as many ranks as are free at its first start{limits}"
    ranks = advice.get("ranks")
    certain = "certain" if advice.get("certain") else "not certain"
    parts = [f"{ranks} rank{'s' * (ranks != 1)} ({certain}){limits}"]
    compared = advice.get("compared_ranks") or ranks
    parts += [f"each of {compared} does {share:.0%} of what one does alone" for share in _numbers(advice, "efficiency")]
    pair = (*_numbers(advice, "exposed_ms"), *_numbers(advice, "compute_ms"))
    if len(pair) == 2:
        sent = "".join(f" of {number(size / 1e6, 3)} MB" for size in _numbers(advice, "gradient_bytes"))
        parts.append(
            f"communication{sent} adds {number(pair[0], 3)} ms to {number(pair[1], 3)} ms of computation per step"
        )
    return "; ".join(parts)


def _numbers(values: Mapping[str, object], name: str) -> tuple[float, ...]:
    """Return the number ``values[name]`` in a tuple; empty without one."""
    value = values.get(name)
    return (float(value),) if isinstance(value, int | float) else ()


def _wanted(name: str, value: object) -> str:
    return format_memory(value) if name == "memory" and isinstance(value, int) else _value(value)


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else clean(str(value))


def _progress(console: Console, job: JobView) -> str:
    progress = job.progress
    if progress is None:
        return ""
    parts = [progress_text(console, job)]
    if progress.fraction is not None and progress.step is not None:
        parts.append(f"step {progress.step}" + (f"/{progress.total_steps}" if progress.total_steps else ""))
    if progress.epoch is not None:
        parts.append(f"epoch {progress.epoch}")
    if progress.fraction is not None and progress.phase:
        parts.append(clean(progress.phase))
    if progress.steps_per_second:
        parts.append(f"{number(progress.steps_per_second, 3)} steps/s")
    return "  ".join(part for part in parts if part)


def _unknown_progress(job: JobView, now: float) -> str:
    """Return how to make progress known, for a job that has run for a while and reported none; else empty."""
    if job.state != "RUNNING" or job.started_at is None or now - job.started_at < SILENT_SECONDS:
        return ""
    return "unknown: this script reports no steps; name them in health.progress, or report them in 3 lines (docs/recipes.md)"


def _speed(job: JobView) -> str:
    """Return the figures of the training system; empty for a job that does not use it."""
    found = job.progress.metrics if job.progress else {}
    if found.get("samples_per_second") is None:
        return ""
    parts = [
        f"{number(value)} {unit}" for name, unit in _SPEED.items() if unit and (value := found.get(name)) is not None
    ]
    mfu = found.get("mfu")
    return "  ".join([*parts, "MFU unknown" if mfu is None else f"MFU {100 * mfu:.1f} %"])


def _metrics(job: JobView) -> str:
    if job.progress is None:
        return ""
    items = [item for item in job.progress.metrics.items() if item[0] not in _SPEED]
    shown = [f"{clean(name)} {metric(name, value)}" for name, value in items[:MAX_METRICS]]
    if len(items) > MAX_METRICS:
        shown.append(f"and {len(items) - MAX_METRICS} more")
    return "  ".join(shown)


def _findings(console: Console, job: JobView, now: float) -> list[str]:
    """Return a line for each finding, with advice and the time for which its figures have shown it."""
    lines = []
    for finding, text in zip(job.findings, finding_lines(job.findings), strict=True):
        since = f" (for {duration(max(0.0, now - finding.since))})" if finding.since else ""
        lines.append(console.style(text + since, "red" if finding.severity == "critical" else "yellow"))
    return lines


def _balance(console: Console, job: JobView) -> str:
    text, band = balance_line(job.balance, QUANTITIES)
    return console.style(text, *BAND_STYLES.get(band, ())) if text else ""


def _ended(job: JobView) -> str:
    if job.ended_at is None:
        return ""
    parts = [clock(job.ended_at)]
    if job.started_at is not None:
        parts.append(f"after {duration(job.ended_at - job.started_at)}")
    if job.exit_code is not None:
        parts.append(f"exit code {job.exit_code}")
    return ", ".join(parts)


def _restarts(job: JobView) -> str:
    if not job.restarts:
        return ""
    classes = ", ".join(f"{count} {name}" for name, count in job.restarts_by_class.items() if count)
    return f"{job.restarts}" + (f" ({classes})" if classes else "")


def _last_failure(job: JobView) -> str:
    """Return a line about the failure after which the job continued; empty for a FAILED job, which is shown in full."""
    if job.failure is None or job.state == "FAILED":
        return ""
    return f"{clean(job.failure.sentence)} ({job.failure.failure_class})"


def _checkpoint(job: JobView) -> str:
    if job.checkpoint is None:
        return ""
    place = clean(job.checkpoint.path) or "in memory"
    at = clock(job.checkpoint.at)
    return f"step {job.checkpoint.step}" + (f", {at}" if at else "") + f", {place}"


def _timings(job: JobView) -> str:
    timings = job.timings
    parts = []
    if timings.queued_seconds is not None:
        parts.append(f"queued {duration(timings.queued_seconds)}")
    if timings.submit_to_first_step_seconds is not None:
        parts.append(f"first step after {duration(timings.submit_to_first_step_seconds)}")
    if timings.recovery_seconds:
        parts.append("recovered in " + ", ".join(duration(seconds) for seconds in timings.recovery_seconds[-5:]))
    if timings.steps_lost:
        parts.append(f"{timings.steps_lost} step{'' if timings.steps_lost == 1 else 's'} done twice")
    return "; ".join(parts)


def _failure(console: Console, failure: FailureView) -> list[str]:
    lines = [console.style(clean(failure.sentence), "red") + f" ({failure.failure_class})"]
    lines += [f"  {console.style('|', 'dim')} {clean(text)}" for text in failure.log_tail]
    if failure.advice:
        lines.append(f"  {clean(failure.advice)}")
    return lines


def _ranks(console: Console, job: JobView) -> list[str]:
    def row(rank: RankView) -> list[Cell]:
        return [
            Cell(str(rank.rank)),
            Cell(clean(rank.node)),
            Cell(", ".join(clean(uuid) for uuid in rank.gpu_uuids)),
            Cell("" if rank.pid is None else str(rank.pid)),
        ]

    columns = (Column("RANK", right=True), Column("NODE"), Column("GPU", shrink=True), Column("PID", right=True))
    lines = render_table(console, columns, [row(rank) for rank in job.gpus[:MAX_RANKS]])
    return [*lines, *_more(len(job.gpus) - MAX_RANKS)]


def _attempts(console: Console, job: JobView) -> list[str]:
    columns = (
        Column("ATTEMPT", right=True),
        Column("STATE"),
        Column("STARTED"),
        Column("TOOK", right=True),
        Column("CLASS"),
        Column("REASON", shrink=True),
    )
    rows = [
        [
            Cell(str(attempt.number)),
            Cell(attempt.state),
            Cell(clock(attempt.started_at)),
            Cell("" if attempt.ended_at is None else duration(attempt.ended_at - attempt.started_at)),
            Cell(attempt.failure_class or ""),
            Cell(clean(attempt.reason), ("dim",)),
        ]
        for attempt in job.attempts[-MAX_ATTEMPTS:]
    ]
    return render_table(console, columns, rows)


def _more(count: int) -> list[str]:
    return [f"and {count} more; --json has them all"] if count > 0 else []
