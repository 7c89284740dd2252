"""Board of a job: its progress, speed, GPUs, restarts and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards import rules, words
from dashboards.cost import job_cost, job_energy, prices
from dashboards.findings import docs_variable, findings
from dashboards.promql import of_chosen_jobs, of_ranks, per, selector
from dashboards.widgets import (
    BYTES,
    CV,
    GPUS,
    RATIO,
    SECONDS,
    WATTS,
    Board,
    Json,
    Look,
    Query,
    Section,
    bars,
    event_annotation,
    finding_annotation,
    lines,
    number,
    source_variable,
    states,
    variable,
)
from orchestrator import catalogue as c
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from grafanalib import core as g

STATE_COLORS = {
    JobState.PENDING: "light-blue",
    JobState.STARTING: "blue",
    JobState.RUNNING: "green",
    JobState.RECOVERING: "orange",
    JobState.DRAINING: "purple",
    JobState.SUSPENDED: "text",
    JobState.SUCCEEDED: "dark-green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "dark-yellow",
}
EVENT_COLORS = {
    "start": "blue",
    "checkpoint": "green",
    "failure": "red",
    "recovery": "orange",
    "preemption": "purple",
}
"""Kinds of `orch_job_event_timestamp_seconds` that are drawn as annotations."""

RATE = "[$__rate_interval]"
RANK = "{{job_id}} rank {{rank}} ({{node}} GPU {{gpu}})"
FINDINGS = of_chosen_jobs(per(c.FINDING.name, *c.FINDING.labels))


def _by_job(metric: c.Metric, **labels: str) -> str:
    return of_chosen_jobs(per(selector(metric, **labels), "job_id"))


def _state_number() -> str:
    terms = [f"{selector(c.JOB_STATE, state=state)} * {i}" for i, state in enumerate(JobState, start=1)]
    return of_chosen_jobs(f"sum by (job_id) ({' or '.join(terms)})")


def _now() -> Section:
    ledger, useful = c.JOB_GPU_TIME.name, selector(c.JOB_GPU_TIME, phase="productive")
    goodput = f"sum by (job_id) (increase({useful}[$__range])) / sum by (job_id) (increase({ledger}[$__range]))"
    return Section(
        title="Now",
        panels=(
            number(
                "Progress",
                "Newest step over the total number of steps, where the script reports both.",
                Query(expr=_by_job(c.JOB_PROGRESS), legend="{{job_id}}"),
                missing=words.NOT_REPORTED,
                look=RATIO,
            ),
            number(
                "Step",
                "Newest optimizer step of rank 0.",
                Query(expr=_by_job(c.JOB_STEP), legend="{{job_id}}"),
                missing=words.NOT_REPORTED,
            ),
            number(
                "GPUs",
                "GPUs that the job holds, whether they report or not.",
                Query(expr=_by_job(c.JOB_GPUS), legend="{{job_id}}"),
                missing=words.NO_JOB,
                look=GPUS,
            ),
            number(
                "Goodput",
                "Share of the job's GPU time in this time range that moved it forward.",
                Query(expr=of_chosen_jobs(goodput), legend="{{job_id}}", now=True),
                missing=words.NO_HELD_TIME,
                look=RATIO,
                graph=False,
            ),
            number(
                "Age of the newest checkpoint",
                "Training time that a failure now would lose at most.",
                Query(
                    expr=f"time() - {per(c.JOB_CHECKPOINT_TIMESTAMP.name, 'job_id')} and on (job_id) " + _chosen(),
                    legend="{{job_id}}",
                ),
                missing=words.NO_CHECKPOINT,
                look=SECONDS,
            ),
            number(
                "Hang suspected",
                "Whether a rank has made no progress for longer than its step times allow: orch status JOB.",
                Query(expr=_by_job(c.JOB_HANG_SUSPECTED), legend="{{job_id}}"),
                missing=words.NO_JOB,
                look=Look(words=((0, "no", "green"), (1, "suspected", "red"))),
            ),
            job_energy(),
            job_cost(),
            states(
                "State",
                "States of the job over time. For their reasons: orch events JOB.",
                Query(expr=_state_number(), legend="{{job_id}}"),
                missing=words.NO_JOB,
                look=Look(
                    words=tuple((i, state.value, STATE_COLORS[state]) for i, state in enumerate(JobState, start=1))
                ),
            ),
        ),
    )


def _chosen() -> str:
    return selector(c.JOB_INFO, queue="=~$queue", user="=~$user", job_id="=~$job_id")


COUNTS_BYTES: Json = {
    "matcher": {"id": "byRegexp", "options": "/_bytes$/"},
    "properties": [{"id": "unit", "value": "bytes"}],
}
"""Override for reported values with names that end in _bytes: only its name shows the unit of such a value."""


def _training() -> Section:
    def metric(name: str) -> str:
        return of_chosen_jobs(per(selector(c.JOB_METRIC, name=name), "job_id", "name"))

    times = of_chosen_jobs(per(c.JOB_RANK_STEP.name, "job_id", "rank"))
    return Section(
        title="Training",
        panels=(
            lines(
                "Loss",
                "Every value that the script reports under a name that contains loss.",
                Query(expr=metric("=~(?i).*loss.*"), legend="{{job_id}} {{name}}"),
                missing=words.NOT_REPORTED,
            ),
            lines(
                "Other reported values",
                "Everything else that the script reports.",
                Query(expr=metric("!~(?i).*loss.*"), legend="{{job_id}} {{name}}"),
                missing=words.NOT_REPORTED,
                look=Look(overrides=(COUNTS_BYTES,)),
            ),
            lines(
                "Samples a second",
                "Training samples over all ranks.",
                Query(expr=of_chosen_jobs(f"sum by (job_id) (rate({c.JOB_SAMPLES.name}{RATE}))"), legend="{{job_id}}"),
                missing=words.NOT_REPORTED,
                look=Look(unit="ops", low=0),
                width=8,
            ),
            lines(
                "Tokens a second",
                "Training tokens over all ranks.",
                Query(expr=of_chosen_jobs(f"sum by (job_id) (rate({c.JOB_TOKENS.name}{RATE}))"), legend="{{job_id}}"),
                missing=words.NOT_REPORTED,
                look=Look(unit="ops", low=0),
                width=8,
            ),
            lines(
                "Model FLOP/s utilization",
                "FLOP/s of the model over the peak FLOP/s of its GPUs.",
                Query(expr=_by_job(c.JOB_MFU), legend="{{job_id}}"),
                missing=words.NOT_REPORTED,
                look=RATIO,
                width=8,
            ),
            lines(
                "Step time by rank",
                "Median time of a rank's newest steps. Ranks in lockstep all show that of the slowest: "
                "then compare the power of their GPUs.",
                Query(expr=times, legend="{{job_id}} rank {{rank}}"),
                missing=words.NOT_REPORTED,
                look=SECONDS,
            ),
            lines(
                "Last sign of life",
                "Time since the last report of the rank that reported longest ago.",
                Query(
                    expr=f"time() - {per(c.JOB_HEARTBEAT_TIMESTAMP.name, 'job_id')} and on (job_id) {_chosen()}",
                    legend="{{job_id}}",
                ),
                missing=words.NOT_REPORTED,
                look=SECONDS,
            ),
        ),
    )


def _gpus() -> Section:
    def per_gpu(title: str, text: str, metric: c.Metric, look: Look) -> g.Panel:
        query = Query(expr=of_ranks(metric.name), legend=RANK)
        return lines(title, text, query, missing=words.NO_EXPORTER, look=look)

    hottest = Query(expr=of_ranks(c.GPU_TEMPERATURE.name), legend=RANK)
    return Section(
        title="GPUs of the job",
        panels=(
            per_gpu("Utilization", "Share of time in which the GPU ran any work.", c.GPU_UTILIZATION, RATIO),
            per_gpu("Memory in use", "Device memory in use on each GPU of the job.", c.GPU_MEMORY_USED, BYTES),
            per_gpu("Power", "Power draw: the best sign of how hard a GPU works.", c.GPU_POWER, WATTS),
            lines(
                "Temperature",
                "The hottest sensor of each GPU.",
                hottest,
                missing=words.NO_EXPORTER,
                look=Look(unit="celsius"),
            ),
        ),
    )


def _balance() -> Section:
    cvs = [
        Query(expr=of_chosen_jobs(per(rules.cv(quantity), "job_id")), legend="{{job_id}} " + quantity)
        for quantity in rules.BALANCED
    ]
    shares = [
        Query(expr=of_chosen_jobs(per(rules.least_share(quantity), "job_id")), legend="{{job_id}} " + quantity)
        for quantity in rules.BALANCED
    ]
    return Section(
        title="Balance",
        panels=(
            lines(
                "Balance over time (CV)",
                "Under 5 % excellent, under 10 % good, under 20 % fair, else poor. No value for one GPU or an idle job.",
                *cvs,
                missing=words.NO_BALANCE,
                look=CV,
                bands=True,
            ),
            lines(
                "Least loaded GPU over the median",
                f"1 is perfect; under {rules.LEAST_SHARE:g}, a GPU is a straggler, however many GPUs the job has.",
                *shares,
                missing=words.NO_BALANCE,
                look=RATIO,
            ),
        ),
    )


def _robustness() -> Section:
    restarts = f"round(sum by (job_id, class) (increase({c.JOB_RESTARTS.name}[$__range])))"
    phases = f"sum by (job_id, phase) (rate({c.JOB_GPU_TIME.name}{RATE}))"
    return Section(
        title="Restarts, checkpoints, goodput",
        panels=(
            bars(
                "Restarts in this time range",
                "By failure class; each class has a budget of its own.",
                Query(expr=of_chosen_jobs(restarts), legend="{{job_id}} {{class}}", now=True),
                missing=words.NO_JOB,
                look=GPUS,
                width=8,
            ),
            lines(
                "Age of the newest checkpoint",
                "The age, and the interval at which the job is set to save.",
                Query(
                    expr=f"time() - {per(c.JOB_CHECKPOINT_TIMESTAMP.name, 'job_id')} and on (job_id) {_chosen()}",
                    legend="{{job_id}} age",
                ),
                Query(expr=_by_job(c.JOB_CHECKPOINT_INTERVAL), legend="{{job_id}} interval"),
                missing=words.NO_CHECKPOINT,
                look=SECONDS,
                width=8,
            ),
            lines(
                "GPU time by phase",
                "GPU seconds per second, by the phase in which they were spent.",
                Query(expr=of_chosen_jobs(phases), legend="{{job_id}} {{phase}}"),
                missing=words.NO_HELD_TIME,
                look=GPUS,
                stacked=True,
                width=8,
            ),
        ),
    )


def run_marks() -> tuple[Json, ...]:
    """Return the annotations for the events of the chosen jobs and for their open findings."""
    return (*_event_marks(), finding_annotation(FINDINGS))


def _event_marks() -> tuple[Json, ...]:
    return tuple(
        event_annotation(
            event.capitalize(),
            of_chosen_jobs(per(selector(c.JOB_EVENT_TIMESTAMP, event=event), "job_id", "event") + " * 1000"),
            color,
        )
        for event, color in EVENT_COLORS.items()
    )


BOARD = Board(
    uid="orch-job",
    title="orch / Job",
    description="Progress, speed, GPUs, balance, restarts and checkpoints of one job or of several side by side.",
    sections=(findings(FINDINGS), _now(), _training(), _gpus(), _balance(), _robustness()),
    variables=(
        source_variable(),
        variable("queue", "Queue", f"label_values({c.JOB_INFO.name}, queue)"),
        variable("user", "User", f'label_values({c.JOB_INFO.name}{{queue=~"$queue"}}, user)'),
        variable("job_id", "Job", f'label_values({c.JOB_INFO.name}{{queue=~"$queue",user=~"$user"}}, job_id)'),
        *prices(),
        docs_variable(),
    ),
    annotations=run_marks(),
)
