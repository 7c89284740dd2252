"""Recording and alerting rules, generated from the metric catalogue.

An alert has a query, the time for which it must hold, and a text. Thresholds are here, those of findings in
core/diagnosis/definitions.py; docs/runbooks/NAME.md, one page for each alert, says what to do. The labels of an alert
identify its subject (job_id, gpu_uuid, node), so that Alertmanager can group, silence and inhibit on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dashboards.promql import (
    GPU_IDENTITY,
    PLACEMENT,
    named_gpu,
    named_job,
    on_gpus_of_jobs,
    only_running,
    per,
    selector,
)
from orchestrator import catalogue as c
from orchestrator.core import thresholds as d

Severity = Literal["info", "warning", "critical"]
Component = Literal["job", "gpu", "node", "queue", "daemon"]

DAEMON_JOB: Final = "orch-daemon"
EXPORTER_JOB: Final = "orch-gpu"
"""Names of the scrape jobs, as in the generated Prometheus configuration."""

CV_LIMIT: Final = d.BALANCE_BANDS[-1]
"""Above this the balance of a job is poor."""
LEAST_SHARE: Final = 0.7
"""A GPU with less than this share of its job's median load is a straggler, however many GPUs there are."""
STARVED_SECONDS: Final = 4 * 3600
"""A job that waits for longer than this is stuck, even when other jobs of its queue start."""
SLOW_RANK: Final = 1.5
"""A rank is slow above this multiple of the other ranks' mean step time."""

HARMLESS_XIDS: Final = (13, 31, 43, 45, 68, 109)
"""Xid codes of errors that the program causes, not the GPU; the job fails because of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A recording rule."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alerting rule. `component` is where the fault is; `labels` are the labels of its series.

    `section`, when set, is the section of docs/diagnosis.md that the alert links to instead of its runbook.
    """

    name: str
    expr: str
    severity: Severity
    component: Component
    summary: str
    description: str
    wait: str = "0s"
    labels: tuple[str, ...] = ()
    keep: str = ""
    section: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rules that are evaluated one after the other, in this order."""

    name: str
    interval: str
    records: tuple[Record, ...] = ()
    alerts: tuple[Alert, ...] = field(default=())


BALANCED: Final = ("utilization", "memory", "power")
"""The quantities that have a balance. Ranks that wait in a collective spin at 100 %: only power shows them."""

MEAN_UTILIZATION: Final = f"gpu_uuid_job_id:{c.GPU_UTILIZATION.name}:avg1m"
"""Name of the recorded utilization of a GPU, per job that holds it, averaged over a minute."""


def cv(quantity: str) -> str:
    """Return the coefficient of variation over each job's GPUs, as the daemon reports it."""
    return selector(c.JOB_GPU_BALANCE_CV, quantity=quantity)


def least_share(quantity: str) -> str:
    """Return each job's least loaded GPU over its median GPU, as the daemon reports it."""
    return selector(c.JOB_GPU_BALANCE_MIN_PER_MEDIAN, quantity=quantity)


SLOW_RANKS: Final = "job_id_rank:orch_job_rank_step_seconds:per_others"
"""Name of the recorded step time of a rank over the mean of the other ranks of its job."""
SILENT_GPUS: Final = "job_id_gpu_uuid_rank:orch_job_gpu:silent"
"""Name of the recorded GPUs that a job holds and that report nothing."""


def _balance_records() -> tuple[Record, ...]:
    return (Record(name=MEAN_UTILIZATION, expr=on_gpus_of_jobs(f"avg_over_time({c.GPU_UTILIZATION.name}[1m])")),)


def _identity_records() -> tuple[Record, ...]:
    now = per(c.GPU_INFO.name, "gpu_uuid", "gpu", "node")
    before = per(f"last_over_time({c.GPU_INFO.name}[1h])", "gpu_uuid", "gpu", "node")
    held = per(c.JOB_GPU.name, "job_id", "gpu_uuid", "rank")
    owner = f"on (job_id) group_left (queue, user) {per(c.JOB_INFO.name, 'job_id', 'queue', 'user')}"
    holder = f"{per(c.JOB_GPU.name, 'job_id', 'gpu_uuid')} * {owner}"
    times = per(c.JOB_RANK_STEP.name, "job_id", "rank")
    others = f"(sum by (job_id) ({c.JOB_RANK_STEP.name}) - on (job_id) group_right () {times})"
    count = f"on (job_id) group_left () (count by (job_id) ({times}) - 1)"
    return (
        # topk keeps one series for a GPU that got another number: two series would break every join
        Record(name=GPU_IDENTITY, expr=f"topk by (gpu_uuid) (1, {now} or on (gpu_uuid) {before})"),
        Record(
            name=PLACEMENT,
            expr=f"{holder} * on (gpu_uuid) group_left (gpu, node) {GPU_IDENTITY}\nor on (gpu_uuid)\n{GPU_IDENTITY}",
        ),
        Record(name=SILENT_GPUS, expr=f"{held} unless on (gpu_uuid) {c.GPU_INFO.name}"),
        Record(name=SLOW_RANKS, expr=f"{times} * {count} / ({others} > 0)"),
    )


def _balance_alerts() -> tuple[Alert, ...]:
    waits = "!=memory"  # a rank that waits for others shows in its GPU's load and power
    cvs = only_running(f"{per(cv(waits), 'job_id', 'quantity')} > {CV_LIMIT}")
    shares = only_running(f"{per(least_share(waits), 'job_id', 'quantity')} < {LEAST_SHARE}")
    return (
        Alert(
            name="OrchJobImbalance",
            expr=cvs,
            wait="5m",
            keep="2m",
            severity="warning",
            component="job",
            labels=("job_id", "quantity"),
            summary="Job {{ $labels.job_id }}: its GPUs are not equally busy ({{ $labels.quantity }} CV {{ $value | humanizePercentage }})",
            description="The {{ $labels.quantity }} of the job's GPUs has varied by more than 20 % of its mean for five "
            "minutes. See which GPU differs: orch top, or the board GPU balance.",
        ),
        Alert(
            name="OrchGpuStraggler",
            expr=shares,
            wait="5m",
            keep="2m",
            severity="warning",
            component="job",
            labels=("job_id", "quantity"),
            summary="Job {{ $labels.job_id }}: one GPU has {{ $value | humanizePercentage }} of the median {{ $labels.quantity }}",
            description="The least loaded GPU of the job has had less than 70 % of the median GPU's "
            "{{ $labels.quantity }} for five minutes; with many GPUs the CV hides that.",
        ),
        Alert(
            name="OrchRankStraggler",
            expr=only_running(f"{SLOW_RANKS} > {SLOW_RANK}"),
            wait="5m",
            keep="2m",
            severity="warning",
            component="job",
            labels=("job_id", "rank"),
            summary='Job {{ $labels.job_id }}: rank {{ $labels.rank }} takes {{ $value | printf "%.1f" }} times as long for a step as the others',
            description="The rank's own work is slow: its data, its CPU or its GPU. Ranks that synchronize at "
            "every step all take as long as the slowest and never raise it: then compare the power of their GPUs.",
        ),
    )


def _gpu_alerts() -> tuple[Alert, ...]:
    xids = "|".join(str(code) for code in HARMLESS_XIDS)
    last_xid = per(f"last_over_time({selector(c.GPU_XID_LAST_TIMESTAMP, xid='!~' + xids)}[10m])", "gpu_uuid", "xid")
    uncorrected = per(selector(c.GPU_ECC_ERRORS, severity="uncorrected", scope="volatile"), "gpu_uuid")
    rows = per(selector(c.GPU_REMAPPED_ROWS, cause="=~pending|failure"), "gpu_uuid", "cause")
    bad_reasons = "thermal|hardware_thermal|hardware_slowdown|power_brake|current|reliability"
    throttled = per(
        f"avg_over_time({selector(c.GPU_THROTTLE_ACTIVE, reason='=~' + bad_reasons)}[5m])", "gpu_uuid", "reason"
    )
    return (
        Alert(
            name="OrchGpuSilent",
            expr=only_running(f"({named_gpu(SILENT_GPUS)}\nor on (job_id, gpu_uuid, rank)\n{SILENT_GPUS})"),
            wait="2m",
            severity="critical",
            component="gpu",
            labels=("job_id", "gpu_uuid", "rank", "gpu", "node"),
            summary="Job {{ $labels.job_id }}: the GPU of rank {{ $labels.rank }} reports nothing",
            description="GPU {{ $labels.gpu_uuid }} (number {{ $labels.gpu }} of node {{ $labels.node }}, as last known) "
            "is held by the job and has had no series for two minutes. It is missing from the job's balance.",
        ),
        Alert(
            name="OrchGpuLost",
            expr=f"{per(c.EXPORTER_UP.name, 'gpu_uuid', 'gpu', 'node')} == 0",
            wait="1m",
            severity="critical",
            component="gpu",
            labels=("gpu_uuid", "gpu", "node"),
            summary="GPU {{ $labels.gpu }} of node {{ $labels.node }} does not answer",
            description="The driver has not answered for GPU {{ $labels.gpu_uuid }} for a minute: it fell off the bus, or "
            "its driver hangs. No new work is placed on it.",
        ),
        Alert(
            name="OrchGpuXid",
            # increase() would miss the first event of a series, and the series of a lost GPU ends
            expr=named_gpu(f"(time() - {last_xid} < 600)"),
            severity="critical",
            component="gpu",
            labels=("gpu_uuid", "xid", "gpu", "node"),
            summary="GPU {{ $labels.gpu }} of node {{ $labels.node }}: Xid {{ $labels.xid }}",
            description="The driver reported Xid {{ $labels.xid }} for GPU {{ $labels.gpu_uuid }} "
            "{{ $value | humanizeDuration }} ago. It is not one of the codes that a program causes.",
        ),
        Alert(
            name="OrchGpuEccUncorrected",
            expr=named_gpu(f"({uncorrected} > 0)"),
            severity="critical",
            component="gpu",
            labels=("gpu_uuid", "gpu", "node"),
            summary="GPU {{ $labels.gpu }} of node {{ $labels.node }}: uncorrected memory errors ({{ $value }})",
            description="Memory of GPU {{ $labels.gpu_uuid }} has lost data since its driver was loaded. Results computed on "
            "it may be wrong; reset it before it is used again.",
        ),
        Alert(
            name="OrchGpuRowRemap",
            expr=named_gpu(f"({rows} > 0)"),
            wait="5m",
            severity="warning",
            component="gpu",
            labels=("gpu_uuid", "cause", "gpu", "node"),
            summary="GPU {{ $labels.gpu }} of node {{ $labels.node }}: row remapping {{ $labels.cause }}",
            description="GPU {{ $labels.gpu_uuid }} will replace a bad memory row at its next reset (pending) or could "
            "not replace one because no spare row is left (failure).",
        ),
        Alert(
            name="OrchGpuThrottled",
            expr=named_gpu(f"({throttled} > 0.5)"),
            wait="5m",
            keep="5m",
            severity="warning",
            component="gpu",
            labels=("gpu_uuid", "reason", "gpu", "node"),
            summary="GPU {{ $labels.gpu }} of node {{ $labels.node }} is slowed down: {{ $labels.reason }}",
            description="The clocks of GPU {{ $labels.gpu_uuid }} were held down for {{ $value | humanizePercentage }} "
            "of the last five minutes. One slow GPU slows every rank of its job.",
        ),
    )


def _exporter_alerts() -> tuple[Alert, ...]:
    up = f'up{{job="{EXPORTER_JOB}"}}'
    held = per(c.JOB_GPU.name, "job_id", "gpu_uuid")
    age = f"time() - {per(c.EXPORTER_LAST_SUCCESS_TIMESTAMP.name, 'gpu_uuid')}"
    return (
        Alert(
            name="OrchExporterDown",
            expr=f"{up} == 0",
            wait="2m",
            severity="warning",
            component="gpu",
            labels=("instance", "job", "node"),
            summary="GPU exporter {{ $labels.instance }} of node {{ $labels.node }} cannot be scraped",
            description="Prometheus has had no answer from it for two minutes. Its GPUs have no samples; jobs continue.",
        ),
        Alert(
            name="OrchNodeDown",
            expr=f'max by (node) (up{{job="{EXPORTER_JOB}", node!=""}}) == 0',
            wait="2m",
            severity="critical",
            component="node",
            labels=("node",),
            summary="Node {{ $labels.node }}: no exporter answers",
            description="None of the node's GPU exporters has answered for two minutes: the node is down or cut off. "
            "Alerts of its GPUs are suppressed while this one fires.",
        ),
        Alert(
            name="OrchNodeUnreachable",
            expr=f"{per(selector(c.NODES, state='unreachable'), 'state')} > 0",
            wait="1m",
            severity="critical",
            component="node",
            labels=("state",),
            summary="Nodes that the daemon cannot reach: {{ $value }}",
            description="Their jobs are degraded, not failed, until Ray declares the nodes dead. To see which nodes: "
            "orch nodes",
        ),
        Alert(
            name="OrchExporterStale",
            expr=named_gpu(f"({age} > 60 and on (gpu_uuid) ({only_running(held)}))"),
            wait="1m",
            severity="warning",
            component="gpu",
            labels=("gpu_uuid", "gpu", "node"),
            summary="GPU {{ $labels.gpu }} of node {{ $labels.node }}: values are {{ $value | humanizeDuration }} old",
            description="The exporter answers but has read nothing new from GPU {{ $labels.gpu_uuid }}: a call into its "
            "driver hangs.",
        ),
    )


def _job_alerts() -> tuple[Alert, ...]:
    failed = per(selector(c.JOB_STATE, state="FAILED"), "job_id")
    # increase() extrapolates, so it would count restarts that did not happen
    counted = f"{selector(c.JOB_RESTARTS, **{'class': '!=preemption'})}[1h]"
    most, least = (f"{which} by (job_id, class) ({which}_over_time({counted}))" for which in ("max", "min"))
    restarts = f"sum by (job_id) ({most} - {least})"
    started = selector(c.JOB_EVENT_TIMESTAMP, event="start")
    saved = f"max by (job_id) ({c.JOB_CHECKPOINT_TIMESTAMP.name} or {started})"
    interval, checkpoint = (
        per(metric.name, "job_id") for metric in (c.JOB_CHECKPOINT_INTERVAL, c.JOB_CHECKPOINT_TIMESTAMP)
    )
    least = f"{d.UNSAVED_SECONDS:.0f}"
    allowed = f"(clamp_min({d.SAVES_MISSED:.0f} * {interval}, {least}) or on (job_id) {checkpoint} * 0 + {least})"
    unsaved = f"time() - {per(started, 'job_id')} > {d.NEVER_SAVED_SECONDS:.0f}"
    idle = f"max without (gpu_uuid) ({MEAN_UTILIZATION}) < {d.IDLE_UTILIZATION}"
    return (
        Alert(
            name="OrchJobFailed",
            expr=named_job(f"({failed} == 1)"),
            severity="warning",
            component="job",
            labels=("job_id", "name", "user", "queue"),
            summary="Job {{ $labels.job_id }} of {{ $labels.user }} failed",
            description="It will not be restarted. For the reason and what to do: orch explain {{ $labels.job_id }}",
        ),
        Alert(
            name="OrchJobRestartLoop",
            expr=f"{restarts} >= 3",
            severity="warning",
            component="job",
            labels=("job_id",),
            summary='Job {{ $labels.job_id }} was restarted {{ $value | printf "%.0f" }} times in an hour',
            description="It fails repeatedly; preemptions are not counted. For the failures: "
            "orch events {{ $labels.job_id }}",
        ),
        Alert(
            name="OrchFinding",
            expr=per(c.FINDING.name, *c.FINDING.labels),
            wait="30s",
            keep="2m",
            severity="warning",
            component="job",
            labels=c.FINDING.labels,
            summary="Job {{ $labels.job_id }}: {{ $labels.kind }}"
            "{{ if $labels.rank }}, rank {{ $labels.rank }}{{ end }}"
            "{{ if $labels.gpu_uuid }}, GPU {{ $labels.gpu_uuid }} of node {{ $labels.node }}{{ end }}",
            description="Found by the daemon's diagnosis. For its figures and what to do: "
            "orch status {{ $labels.job_id }}",
            section="{{ $labels.kind }}",
        ),
        Alert(
            name="OrchJobHangSuspected",
            # a flag that is cleared and set again within two minutes is one hang
            expr=only_running(f"{per(f'max_over_time({c.JOB_HANG_SUSPECTED.name}[2m])', 'job_id')} == 1"),
            wait="1m",
            severity="critical",
            component="job",
            labels=("job_id",),
            summary="Job {{ $labels.job_id }} has stopped making steps",
            description="A rank has made no progress for longer than its own step times allow. To see which: "
            "orch status {{ $labels.job_id }}",
        ),
        Alert(
            name="OrchCheckpointTooOld",
            expr=only_running(f"(time() - {saved} > on (job_id) {allowed})"),
            wait="5m",
            severity="warning",
            component="job",
            labels=("job_id",),
            summary="Job {{ $labels.job_id }}: no checkpoint for {{ $value | humanizeDuration }}",
            description="That is more than half an hour, and more than three times the interval at which it is set to save. "
            "A failure now would lose all of it.",
        ),
        Alert(
            name="OrchJobNeverSaved",
            expr=only_running(f"({unsaved} unless on (job_id) ({checkpoint} or {interval}))"),
            wait="5m",
            severity="warning",
            component="job",
            labels=("job_id",),
            summary="Job {{ $labels.job_id }} has run for {{ $value | humanizeDuration }} without any checkpoint",
            description="It has no save interval and saved nothing. After a failure it would start again at step 0.",
        ),
        Alert(
            name="OrchJobGpusIdle",
            expr=only_running(f"({idle})"),
            wait="10m",
            keep="2m",
            severity="warning",
            component="job",
            labels=("job_id",),
            summary="Job {{ $labels.job_id }} is running, but all its GPUs are idle",
            description="None of its GPUs has been busy for ten minutes: the job waits, hangs, or computes on CPUs. To see which: "
            "orch status {{ $labels.job_id }}",
        ),
    )


def _service_alerts() -> tuple[Alert, ...]:
    daemon = f'up{{job="{DAEMON_JOB}"}}'
    waits = per(c.QUEUE_OLDEST_PENDING.name, "queue")
    starts = f"sum by (queue) (increase({c.QUEUE_WAIT.name}_count[1h])) > 0"
    room = f"(sum({selector(c.GPUS, state='idle')}) > 0 or absent({c.GPUS.name}))"
    free_share = f"{c.DISK_FREE.name} / {c.DISK_SIZE.name}"
    return (
        Alert(
            name="OrchDaemonDown",
            expr=f"{daemon} == 0 or absent({daemon})",
            wait="1m",
            severity="critical",
            component="daemon",
            labels=("job", "instance"),
            summary="The orch daemon does not answer",
            description="Running jobs continue without it, but nothing is queued, restarted or shown until it is back.",
        ),
        Alert(
            name="OrchQueueStuck",
            expr=f"({waits} > 3600 unless on (queue) ({starts} unless on (queue) {waits} > {STARVED_SECONDS}))\nand on () {room}",
            wait="10m",
            severity="warning",
            component="queue",
            labels=("queue",),
            summary="Queue {{ $labels.queue }}: a job has waited for {{ $value | humanizeDuration }} while GPUs are idle",
            description="No job of this queue started in the last hour, or others did and this one has waited for over "
            "four hours. For the waiting jobs and their reasons: orch queue",
        ),
        Alert(
            name="OrchDiskFilling",
            expr=f"predict_linear({c.DISK_FREE.name}[3h], 86400) < 0\nand {free_share} < 0.25",
            wait="30m",
            severity="warning",
            component="daemon",
            labels=("node", "path", "job", "instance"),
            summary="Disk of {{ $labels.path }} on {{ $labels.node }} will be full within a day",
            description="Predicted from the last three hours. Checkpoints and logs are the usual cause: orch prune --dry-run",
        ),
        Alert(
            name="OrchDiskAlmostFull",
            expr=f"{free_share} < 0.05",
            wait="5m",
            severity="critical",
            component="daemon",
            labels=("node", "path", "job", "instance"),
            summary="Disk of {{ $labels.path }} on {{ $labels.node }}: {{ $value | humanizePercentage }} free",
            description="When it is full, checkpoints fail and new jobs are refused; running ones are still recorded.",
        ),
        Alert(
            name="OrchStoreCommitFailing",
            expr=f"increase({c.STORE_COMMIT_FAILURES.name}[10m]) > 0",
            severity="critical",
            component="daemon",
            labels=("job", "instance"),
            summary="The daemon cannot write its store",
            description="Nothing is acknowledged before it is written, so submissions and transitions wait. Check the disk.",
        ),
        Alert(
            name="OrchDaemonSlow",
            expr=f"avg_over_time({c.DAEMON_LOOP_LAG.name}[5m]) > {d.LATE_SECONDS:g}",
            wait="5m",
            severity="warning",
            component="daemon",
            labels=("job", "instance"),
            summary="The daemon's loop is late by {{ $value | humanizeDuration }}",
            description="It reacts to failures and submissions that late. Its machine is overloaded, or a disk hangs.",
        ),
    )


GROUPS: Final = (
    Group(name="orch-identity", interval="15s", records=_identity_records()),
    Group(name="orch-gpu-balance", interval="15s", records=_balance_records(), alerts=_balance_alerts()),
    Group(name="orch-gpu", interval="15s", alerts=_gpu_alerts()),
    Group(name="orch-exporters", interval="15s", alerts=_exporter_alerts()),
    Group(name="orch-jobs", interval="15s", alerts=_job_alerts()),
    Group(name="orch-service", interval="15s", alerts=_service_alerts()),
)
"""All rules. Groups are evaluated concurrently; only within a group is a rule evaluated before those that follow it."""

ALERTS: Final = tuple(alert for group in GROUPS for alert in group.alerts)
RECORDS: Final = tuple(record for group in GROUPS for record in group.records)


def document(groups: tuple[Group, ...] = GROUPS, *, runbooks: str = "docs/runbooks") -> dict[str, Any]:
    """Return the rule file as plain values. `runbooks` is the location of the pages: a path or a URL."""
    return {
        "groups": [
            {
                "name": group.name,
                "interval": group.interval,
                "rules": [
                    *({"record": record.name, "expr": record.expr} for record in group.records),
                    *(_alert(alert, runbooks) for alert in group.alerts),
                ],
            }
            for group in groups
        ]
    }


def _alert(alert: Alert, runbooks: str) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expr}
    if alert.wait != "0s":
        rule["for"] = alert.wait
    if alert.keep:
        rule["keep_firing_for"] = alert.keep
    rule["labels"] = {"severity": alert.severity, "component": alert.component}
    page = f"{runbooks}/{alert.name}.md"
    if alert.section and runbooks.endswith("/runbooks"):
        page = f"{runbooks.removesuffix('/runbooks')}/diagnosis.md#{alert.section}"
    rule["annotations"] = {"summary": alert.summary, "description": alert.description, "runbook_url": page}
    return rule
