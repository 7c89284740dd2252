"""Board of the cluster, for its operators: GPUs, queue, goodput, balance and the daemon."""

from __future__ import annotations

from dashboards import rules, words
from dashboards.cost import cluster_cost, prices
from dashboards.findings import docs_variable, findings
from dashboards.promql import GPU_IDENTITY, of_chosen_owners, per, selector
from dashboards.widgets import (
    BYTES,
    CV,
    GPUS,
    NONE_IS_GOOD,
    RATIO,
    SECONDS,
    SHARE,
    WATTS,
    Board,
    Look,
    Query,
    Section,
    bars,
    finding_annotation,
    lines,
    number,
    source_variable,
    table,
    variable,
)
from orchestrator import catalogue as c

GOODPUT = Look(unit="percentunit", low=0, high=1, base="red", limits=((0.6, "orange"), (0.85, "green")))
STATES = selector(c.GPUS, node="=~$node")
JOBS = selector(c.JOBS, queue="=~$queue")
LEDGER = selector(c.GPU_SECONDS, queue="=~$queue")
USEFUL = selector(c.GPU_SECONDS, queue="=~$queue", phase="productive")
FINDINGS = of_chosen_owners(per(c.FINDING.name, *c.FINDING.labels))
WAITS = f'{c.QUEUE_WAIT.name}_bucket{{queue=~"$queue"}}'


def _of_nodes(expression: str) -> str:
    return f"{per(expression, 'gpu_uuid')} * on (gpu_uuid) group_left (node) {GPU_IDENTITY}" + '{node=~"$node"}'


ENERGY = _of_nodes(f"increase({c.GPU_ENERGY.name}[$__range])")


def _gpus_in(state: str) -> Query:
    return Query(expr=f"sum({selector(c.GPUS, node='=~$node', state=state)})", legend=state)


def _now() -> Section:
    firing = 'ALERTS{alertname=~"Orch.*",alertstate="firing"}'
    return Section(
        title="Now",
        panels=(
            number("GPUs in use", "GPUs that a job holds.", _gpus_in("busy"), missing=words.NO_DAEMON, look=GPUS),
            number(
                "GPUs idle",
                "GPUs that are free and could take work.",
                _gpus_in("idle"),
                missing=words.NO_DAEMON,
                look=GPUS,
            ),
            number(
                "GPUs broken",
                "GPUs that are silent or lost: nothing is placed on them.",
                _gpus_in("broken"),
                missing=words.NO_DAEMON,
                look=NONE_IS_GOOD,
            ),
            number(
                "Jobs waiting",
                "Jobs in the queue.",
                Query(expr=f"sum({selector(c.JOBS, queue='=~$queue', state='PENDING')})", legend="waiting"),
                missing=words.NO_DAEMON,
                look=GPUS,
            ),
            number(
                "Goodput",
                "Share of the GPU time of the whole time range that moved training forward.",
                Query(
                    expr=f"sum(increase({USEFUL}[$__range])) / sum(increase({LEDGER}[$__range]))",
                    legend="goodput",
                    now=True,
                ),
                missing=words.NO_HELD_TIME,
                look=GOODPUT,
                graph=False,
            ),
            number(
                "Alerts",
                "Firing alerts of orch. 0 only while the daemon is scraped, else no value.",
                Query(expr=f'count({firing}) or on () 0 * count(up{{job="{rules.DAEMON_JOB}"}} == 1)', legend="firing"),
                missing=words.NO_DAEMON,
                look=NONE_IS_GOOD,
            ),
        ),
    )


def _gpus() -> Section:
    return Section(
        title="GPUs",
        panels=(
            lines(
                "GPUs by state",
                "Busy: held by a job. Broken: silent or lost. Cordoned: kept from new work by a person.",
                Query(expr=f"sum by (state) ({STATES})", legend="{{state}}"),
                missing=words.NO_DAEMON,
                look=GPUS,
                stacked=True,
            ),
            lines(
                "GPUs that are not busy, by node",
                "GPUs that are idle, broken or cordoned, by node.",
                Query(expr=f'sum by (node, state) ({STATES[:-1]},state!="busy"}})', legend="{{node}} {{state}}"),
                missing=words.NO_DAEMON,
                look=GPUS,
            ),
            lines(
                "Utilization by node",
                "Mean over the node's GPUs of the share of time in which they ran any work: busy, not efficient.",
                Query(expr=f"avg by (node) ({_of_nodes(c.GPU_UTILIZATION.name)})", legend="{{node}}"),
                missing=words.NO_EXPORTER,
                look=RATIO,
            ),
            lines(
                "Power by node",
                "Sum over the node's GPUs.",
                Query(expr=f"sum by (node) ({_of_nodes(c.GPU_POWER.name)})", legend="{{node}}"),
                missing=words.NO_EXPORTER,
                look=WATTS,
                stacked=True,
            ),
            number(
                "Energy",
                "Energy that the GPUs used in this time range, from the hardware's own counters.",
                Query(expr=f"sum({ENERGY})", legend="energy", now=True),
                missing=words.NO_EXPORTER,
                look=Look(unit="joule", low=0),
                graph=False,
                width=6,
            ),
            cluster_cost(f"sum(increase({LEDGER}[$__range]))", f"sum({ENERGY})"),
            number(
                "Nodes out of reach",
                "Nodes that the daemon cannot reach.",
                Query(expr=per(selector(c.NODES, state="unreachable"), "state"), legend="unreachable"),
                missing=words.NO_DAEMON,
                look=NONE_IS_GOOD,
                width=6,
            ),
            bars(
                "GPU memory in use by node",
                "Share of the node's GPU memory.",
                Query(
                    expr=f"sum by (node) ({_of_nodes(c.GPU_MEMORY_USED.name)}) "
                    f"/ sum by (node) ({_of_nodes(c.GPU_MEMORY_TOTAL.name)})",
                    legend="{{node}}",
                ),
                missing=words.NO_EXPORTER,
                look=RATIO,
                height=4,
            ),
        ),
    )


def _queue() -> Section:
    return Section(
        title="Queue and jobs",
        panels=(
            lines(
                "Jobs by state",
                "Jobs that have not ended.",
                Query(expr=f"sum by (state) ({JOBS})", legend="{{state}}"),
                missing=words.NO_DAEMON,
                look=GPUS,
                stacked=True,
            ),
            lines(
                "Longest wait",
                "Age of the job that has waited longest, by queue.",
                Query(
                    expr=per(selector(c.QUEUE_OLDEST_PENDING, queue="=~$queue"), "queue"),
                    legend="{{queue}}",
                ),
                missing=words.NO_DAEMON,
                look=SECONDS,
            ),
            lines(
                "Wait until the start",
                "Time from acceptance to the start of the first attempt: the median and the 95th percentile.",
                Query(expr=f"histogram_quantile(0.5, sum by (le) (rate({WAITS}[$__rate_interval])))", legend="half"),
                Query(expr=f"histogram_quantile(0.95, sum by (le) (rate({WAITS}[$__rate_interval])))", legend="95 %"),
                missing=words.NO_STARTS,
                look=SECONDS,
            ),
            lines(
                "Jobs that ended",
                "By state and, for failed ones, by failure class.",
                Query(
                    expr=f"sum by (state, class) (increase({selector(c.JOBS_FINISHED, queue='=~$queue')}[$__rate_interval]))",
                    legend="{{state}} {{class}}",
                ),
                missing=words.NO_DAEMON,
                look=GPUS,
                stacked=True,
            ),
        ),
    )


def _goodput() -> Section:
    share = f"sum(rate({USEFUL}[$__rate_interval])) / sum(rate({LEDGER}[$__rate_interval]))"
    return Section(
        title="Goodput: where GPU time goes",
        panels=(
            lines(
                "GPU time by phase",
                "GPU seconds per second. A step counts as productive when a checkpoint covers it or its job succeeds, "
                "and as lost when it must be repeated.",
                Query(expr=f"sum by (phase) (rate({LEDGER}[$__rate_interval]))", legend="{{phase}}"),
                missing=words.NO_HELD_TIME,
                look=GPUS,
                stacked=True,
            ),
            lines(
                "Goodput",
                "Productive share of the GPU time that was accounted for.",
                Query(expr=share, legend="goodput"),
                missing=words.NO_HELD_TIME,
                look=RATIO,
            ),
            lines(
                "Not yet covered by a checkpoint",
                "GPU time of steps that a failure now would lose.",
                Query(
                    expr=f"sum by (queue) ({selector(c.GPU_SECONDS_UNCOMMITTED, queue='=~$queue')})",
                    legend="{{queue}}",
                ),
                missing=words.NO_DAEMON,
                look=SECONDS,
            ),
            bars(
                "GPU time in this time range",
                "GPU seconds by phase.",
                Query(expr=f"sum by (phase) (increase({LEDGER}[$__range]))", legend="{{phase}}", now=True),
                missing=words.NO_HELD_TIME,
                look=SECONDS,
            ),
        ),
    )


def _balance() -> Section:
    def of(name: str) -> str:
        return of_chosen_owners(f"max by (job_id) ({name})")

    names = of_chosen_owners(per(c.JOB_INFO.name, "job_id", "name", "user", "queue"))
    return Section(
        title="Balance and stragglers",
        panels=(
            table(
                "Balance of every job",
                "CV: standard deviation over mean across the job's GPUs; under 5 % excellent, under 10 % good, under 20 % "
                "fair, else poor. Ranks that wait in a collective spin at full utilization: only power shows them.",
                Query(expr=names),
                Query(expr=of(rules.cv("utilization"))),
                Query(expr=of(rules.cv("power"))),
                Query(expr=of(rules.least_share("power"))),
                Query(expr=of(c.JOB_GPUS.name)),
                Query(expr=of(c.JOB_GPU_SILENT.name)),
                missing=words.NO_DAEMON,
                columns={
                    "job_id": "Job",
                    "user": "User",
                    "queue": "Queue",
                    "Value #E": "GPUs",
                    "Value #B": "CV utilization",
                    "Value #C": "CV power",
                    "Value #D": "Least / median power",
                    "Value #F": "Silent",
                },
                looks={
                    "CV utilization": CV,
                    "CV power": CV,
                    "Least / median power": SHARE,
                    "Silent": NONE_IS_GOOD,
                },
                sort="CV power",
            ),
            bars(
                "Worst stragglers",
                "Step time of the slowest ranks over the mean of their job's other ranks, waiting included.",
                Query(
                    expr=f"topk(10, {of_chosen_owners(rules.SLOW_RANKS)})",
                    legend="{{job_id}} rank {{rank}}",
                    now=True,
                ),
                missing=words.NOT_REPORTED,
                look=Look(unit="short", decimals=2, low=0, limits=((1.2, "orange"), (rules.SLOW_RANK, "red"))),
            ),
            table(
                "Alerts that fire",
                "Each alert has a page in docs/runbooks.",
                Query(expr='ALERTS{alertname=~"Orch.*",alertstate="firing"}'),
                missing="No alert fires (or Prometheus has no rules: see Alerts above)",
                columns={
                    "alertname": "Alert",
                    "severity": "Severity",
                    "job_id": "Job",
                    "node": "Node",
                    "gpu": "GPU",
                    "rank": "Rank",
                },
                width=12,
            ),
        ),
    )


def _daemon() -> Section:
    def quantile(metric: c.Metric) -> str:
        return f"histogram_quantile(0.99, sum by (le) (rate({metric.name}_bucket[$__rate_interval])))"

    return Section(
        title="The daemon",
        panels=(
            lines(
                "Latency",
                "99th percentile of the time of a submission and of a decision; lag of the daemon's loop.",
                Query(expr=quantile(c.SUBMISSION), legend="submission"),
                Query(expr=quantile(c.SCHEDULING), legend="decision"),
                Query(expr=f"max({c.DAEMON_LOOP_LAG.name})", legend="loop is late by"),
                missing=words.NO_DAEMON,
                look=SECONDS,
                width=8,
            ),
            lines(
                "Disk",
                "Free space where the daemon keeps its state, checkpoints and logs.",
                Query(expr=per(c.DISK_FREE.name, "node", "path"), legend="{{node}} {{path}}"),
                missing=words.NO_DAEMON,
                look=BYTES,
                width=8,
            ),
            lines(
                "Trouble",
                "Failed transactions of the store and failed readings of GPUs, per second.",
                Query(expr=f"sum(rate({c.STORE_COMMIT_FAILURES.name}[$__rate_interval]))", legend="store"),
                Query(expr=f"sum(rate({c.EXPORTER_READ_ERRORS.name}[$__rate_interval]))", legend="GPU readings"),
                missing=words.NO_DAEMON,
                look=Look(unit="ops", low=0),
                width=8,
            ),
            table(
                "Daemon",
                "Version, node and start time of the daemon.",
                Query(expr=c.DAEMON_INFO.name),
                Query(expr=f"max by (instance) ({c.DAEMON_START_TIMESTAMP.name} * 1000)"),
                missing=words.NO_DAEMON,
                columns={"node": "Node", "version": "Version", "Value #B": "Up since"},
                looks={"Up since": Look(unit="dateTimeAsIso")},
                height=4,
            ),
        ),
    )


BOARD = Board(
    uid="orch-cluster",
    title="orch / Cluster",
    description="GPUs, queue, goodput, balance of every job, energy and alerts of one orch cluster.",
    sections=(findings(FINDINGS), _now(), _gpus(), _queue(), _goodput(), _balance(), _daemon()),
    variables=(
        source_variable(),
        variable("queue", "Queue", f"label_values({c.JOBS.name}, queue)"),
        variable("user", "User", f"label_values({c.JOB_INFO.name}, user)"),
        variable("node", "Node", f"label_values({c.GPUS.name}, node)"),
        *prices(),
        docs_variable(),
    ),
    annotations=(finding_annotation(FINDINGS),),
)
