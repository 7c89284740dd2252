"""Jobs as tables and lines: the list, one job in full, and when those that wait start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.cli.console import clean, clip
from orchestrator.cli.render.gpus import BAND_STYLES, balance_line, finding_lines, poor_balance
from orchestrator.cli.render.table import Cell, Column, bar, render_table
from orchestrator.spec.units import format_memory
from orchestrator.units import age, clock, duration, metric, number, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from orchestrator.api.queue_views import HolderView, OutlookView
    from orchestrator.api.views import AttemptView, FailureView, JobView, RankView
    from orchestrator.cli.console import Console


BAR_WIDTH = 10
NARROW = 72
STATE_STYLES = {
    "PENDING": ("yellow",),
    "STARTING": ("cyan",),
    "RUNNING": ("green",),
    "RECOVERING": ("magenta",),
    "DRAINING": ("magenta",),
    "SUSPENDED": ("yellow",),
    "SUCCEEDED": ("green", "bold"),
    "FAILED": ("red", "bold"),
    "CANCELLED": ("dim",),
}
MOVING = frozenset({"STARTING", "RUNNING", "RECOVERING", "DRAINING"})


def job_lines(
    console: Console, jobs: Sequence[JobView], now: float, places: Mapping[str, str] | None = None
) -> list[str]:
    """Return a table of jobs, those of a matrix in one line; USER if there are several. ``places``: in the queue, by id."""
    places = places or {}
    several = len({job.user for job in jobs}) > 1
    groups = _grouped(jobs)
    if console.width >= NARROW:
        return render_table(console, _columns(console, now, places, with_user=several), groups)
    lines: list[str] = []
    for group in groups:
        if len(group) == 1:
            lines += _stacked(console, group[0], now, _remark(group[0], places))
        else:
            lines += _stacked_unit(console, group, now)
    return lines


def _columns(
    console: Console, now: float, places: Mapping[str, str], *, with_user: bool
) -> tuple[Column[Sequence[JobView]], ...]:
    """Return the columns of a job, or of a matrix's jobs in one line."""

    def state(jobs: Sequence[JobView]) -> Cell:
        job = jobs[0]
        return Cell("matrix", ("dim",)) if len(jobs) > 1 else Cell(state_text(job), STATE_STYLES.get(job.state, ()))

    def remark(jobs: Sequence[JobView]) -> Cell:
        return Cell(_unit(jobs)[2], ("dim",)) if len(jobs) > 1 else _remark(jobs[0], places)

    def gpus(jobs: Sequence[JobView]) -> str:
        return gpus_text(jobs[0]) if len(jobs) == 1 else _gpus(job.gpu_count for job in jobs if job.state in MOVING)

    return (
        Column("JOB", lambda jobs: _unit(jobs)[0] if len(jobs) > 1 else jobs[0].id, weight=1000, styles=("bold",)),
        Column("STATE", state, weight=900),
        Column(
            "PROGRESS", lambda jobs: _unit(jobs)[1] if len(jobs) > 1 else progress_text(console, jobs[0]), weight=800
        ),
        Column(
            "RESTARTS", lambda jobs: sum(job.restarts for job in jobs) or "", weight=500, right=True, styles=("yellow",)
        ),
        Column("GPUS", gpus, weight=400, right=True),
        Column("AGE", lambda jobs: age(now - min(job.submitted_at for job in jobs)), weight=600, right=True),
        Column("USER", lambda jobs: jobs[0].user if with_user else "", weight=300),
        Column("REASON", remark, weight=700, shrink=True, least=16),
    )


def _grouped(jobs: Sequence[JobView]) -> list[Sequence[JobView]]:
    """Group the jobs of one matrix, at the place of the first of them."""
    groups: dict[str, list[JobView]] = {}
    for place, job in enumerate(jobs):
        groups.setdefault(str(place) if job.matrix is None else job.matrix.id, []).append(job)
    return list(groups.values())


def _unit(jobs: Sequence[JobView]) -> tuple[str, str, str]:
    """Return a matrix's id, the number of its jobs shown, and their states."""
    cell = jobs[0].matrix
    assert cell is not None
    counts = {state: sum(job.state == state for job in jobs) for state in STATE_STYLES}
    states = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    return cell.id, f"{len(jobs)} jobs", states


def _stacked_unit(console: Console, jobs: Sequence[JobView], now: float) -> list[str]:
    name, size, states = _unit(jobs)
    facts = f" {console.glyphs.dot} ".join([size, states, age(now - min(job.submitted_at for job in jobs))])
    shown = clip(name, console.width - len("matrix") - 2, console.glyphs.ellipsis)
    return [
        f"{console.style(shown, 'bold')}  {console.style('matrix', 'dim')}",
        "  " + clip(facts, console.width - 2, console.glyphs.ellipsis),
    ]


def _stacked(console: Console, job: JobView, now: float, remark: Cell) -> list[str]:
    dot = f" {console.glyphs.dot} "
    facts = [progress_text(console, job)]
    if job.gpu_count:
        facts.append(plural(job.gpu_count, "GPU"))
    if job.restarts:
        facts.append(plural(job.restarts, "restart"))
    facts.append(age(now - job.submitted_at))
    state = state_text(job)
    name = clip(job.id, console.width - len(state) - 2, console.glyphs.ellipsis)
    lines = [f"{console.style(name, 'bold')}  {console.style(state, *STATE_STYLES.get(job.state, ()))}"]
    lines.append("  " + clip(dot.join(fact for fact in facts if fact), console.width - 2, console.glyphs.ellipsis))
    if remark.text:
        lines.append(
            "  " + console.style(clip(remark.text, console.width - 2, console.glyphs.ellipsis), *remark.styles)
        )
    return lines


def _remark(job: JobView, places: Mapping[str, str]) -> Cell:
    """Return the first finding, the stall, or a poor balance; else a waiting job's place, and the state's reason."""
    if job.findings:
        more = f" (and {len(job.findings) - 1} more)" if len(job.findings) > 1 else ""
        first = job.findings[0]
        return Cell(clean(first.sentence) + more, ("red" if first.severity == "critical" else "yellow",))
    if job.stall:
        return Cell(clean(job.stall), ("yellow",))
    poor = poor_balance(job.balance) if job.state == "RUNNING" else ""
    if poor:
        return Cell(clean(poor), ("yellow",))
    place = places.get(job.id, "") if job.state == "PENDING" else ""
    return Cell(": ".join(part for part in (place, clean(job.reason)) if part), ("dim",))


def state_text(job: JobView) -> str:
    """Return the state, marked if the job runs with a part unreachable."""
    return f"{job.state} (degraded)" if job.degraded else job.state


def progress_text(console: Console, job: JobView) -> str:
    """Return a bar with the share done and the time left, else step and phase; empty if no progress was reported."""
    progress = job.progress
    if progress is None:
        return ""
    if progress.fraction is None:
        parts = [f"step {progress.step}" if progress.step is not None else "", clean(progress.phase or "")]
        return " ".join(part for part in parts if part)
    text = f"{bar(progress.fraction, BAR_WIDTH, console.glyphs)} {int(100 * min(progress.fraction, 1.0)):3d}%"
    if progress.eta_seconds is not None and job.state in MOVING:
        text += f" {duration(max(1.0, progress.eta_seconds))} left"
    return text


def gpus_text(job: JobView) -> str:
    """Return the number of GPUs; empty for none."""
    return _gpus([job.gpu_count])


def _gpus(counts: Iterable[float]) -> str:
    return number(sum(counts) or None)


MAX_ROWS: Final = 10
MAX_AHEAD: Final = 5
RULES: Final = {
    "resized": "it is only being resized",
    "overdue": "none of its kind has started for too long (ORCH_AGEING)",
    "queue": "its queue is under its guarantee, or has the smaller share",
    "priority": "it has the higher priority",
    "user": "its user has the smaller share",
    "aged": "it has waited for longer (ORCH_AGEING)",
    "work": "it is expected to need less time, or has run for less",
    "arrival": "it came first",
}


def outlook_lines(console: Console, outlook: OutlookView, now: float) -> list[str]:
    """Return the lines for one job that waits."""
    lines = ["", f"expected start: {expected(outlook, now)}"]
    if outlook.ahead:
        names = ", ".join(clean(job_id) for job_id in outlook.ahead[:MAX_AHEAD])
        more = ", ..." if len(outlook.ahead) > MAX_AHEAD else ""
        why = f"; {clean(outlook.ahead[-1])} is before it: {RULES.get(outlook.rule, clean(outlook.rule))}"
        lines.append(f"{len(outlook.ahead)} ahead in the queue: {names}{more}{why if outlook.rule else ''}")
    if outlook.holders:
        lines += ["", "jobs that have to end first:"]
        lines += render_table(console, _holder_columns(now), outlook.holders[:MAX_ROWS])
        if len(outlook.holders) > MAX_ROWS:
            lines.append(f"and {len(outlook.holders) - MAX_ROWS} more")
    if outlook.stops:
        hours = sum(stop.lost_gpu_seconds or 0.0 for stop in outlook.stops) / 3600
        names = ", ".join(f"{clean(stop.job_id)} ({clean(stop.user)})" for stop in outlook.stops)
        lines.append(f"preemption for it would stop {names}, which repeat at most {number(round(hours, 2))} GPU hours")
    return lines


def expected(outlook: OutlookView, now: float) -> str:
    """Return the expected start of the job as text."""
    if outlook.starts_at is None:
        return "not known" if outlook.holders else "no estimate"
    left = outlook.starts_at - now
    return "now" if left < 1 else f"in about {age(left)}, at {clock(outlook.starts_at, seconds=False)}"


def places(outlook: OutlookView, now: float) -> dict[str, str]:
    """Return the short form by job id: the place in the queue, and the expected start if it is known."""
    return {job_id: _place(at, outlook.starts.get(job_id), now) for at, job_id in enumerate(outlook.order, 1)}


def _place(at: int, starts_at: float | None, now: float) -> str:
    if starts_at is None:
        return f"place {at}"
    left = starts_at - now
    return f"place {at}, starts " + ("now" if left < 1 else f"in about {age(left)}")


def _holder_columns(now: float) -> tuple[Column[HolderView], ...]:
    return (
        Column("JOB", lambda holder: holder.job_id, weight=1000, styles=("bold",)),
        Column("USER", lambda holder: holder.user, weight=300),
        Column("GPUS", lambda holder: number(round(holder.gpus, 2)), weight=900, right=True),
        Column(
            "ENDS",
            lambda holder: "?" if holder.ends_at is None else f"in {age(max(0.0, holder.ends_at - now))}",
            weight=800,
            right=True,
        ),
        Column("KNOWN FROM", _basis, weight=500),
    )


def _basis(holder: HolderView) -> str:
    """Return the basis of the expected end of the job."""
    match holder.basis:
        case "like jobs":
            off = "" if holder.error is None else f", half of such forecasts within {holder.error:.0%}"
            return f"run times of {holder.like_jobs} like jobs{off}"
        case "time so far":
            return "it runs as long again as it has"
        case "":
            return "nothing is known of it"
        case _:
            return clean(holder.basis)


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
        lines += ["", *render_table(console, RANK_COLUMNS, job.gpus[:MAX_RANKS]), *_more(len(job.gpus) - MAX_RANKS)]
    if len(job.attempts) > 1:
        lines += ["", *render_table(console, ATTEMPT_COLUMNS, job.attempts[-MAX_ATTEMPTS:])]
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
        points = f" ({plural(tracker.points, 'point')}{waiting})"
        lines.append(f"{clean(tracker.name)}: " + (f"{clean(tracker.where)}{points}" if tracker.where else "not begun"))
        if tracker.problem:
            lines.append(console.style(f"{clean(tracker.name)} failed: {clean(tracker.problem)}", "yellow"))
    return lines


def _workers(job: JobView) -> str:
    """Return the number of ranks; for an elastic job, with its bounds."""
    bounds = job.resources.get("num_workers")
    if isinstance(bounds, dict):
        return f"{job.num_workers} of {bounds.get('min')}-{bounds.get('max')} ranks"
    return plural(job.num_workers, "rank")


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
        parts.append(f"{plural(timings.steps_lost, 'step')} done twice")
    return "; ".join(parts)


def _failure(console: Console, failure: FailureView) -> list[str]:
    lines = [console.style(clean(failure.sentence), "red") + f" ({failure.failure_class})"]
    lines += [f"  {console.style('|', 'dim')} {clean(text)}" for text in failure.log_tail]
    if failure.advice:
        lines.append(f"  {clean(failure.advice)}")
    return lines


RANK_COLUMNS: tuple[Column[RankView], ...] = (
    Column("RANK", lambda rank: rank.rank, right=True),
    Column("NODE", lambda rank: rank.node),
    Column("GPU", lambda rank: ", ".join(rank.gpu_uuids), shrink=True),
    Column("PID", lambda rank: rank.pid, right=True),
)
ATTEMPT_COLUMNS: tuple[Column[AttemptView], ...] = (
    Column("ATTEMPT", lambda attempt: attempt.number, right=True),
    Column("STATE", lambda attempt: attempt.state),
    Column("STARTED", lambda attempt: clock(attempt.started_at)),
    Column(
        "TOOK",
        lambda attempt: "" if attempt.ended_at is None else duration(attempt.ended_at - attempt.started_at),
        right=True,
    ),
    Column("CLASS", lambda attempt: attempt.failure_class),
    Column("REASON", lambda attempt: attempt.reason, shrink=True, styles=("dim",)),
)


def _more(count: int) -> list[str]:
    return [f"and {count} more; --json has them all"] if count > 0 else []
