"""Board of GPU balance: the GPUs side by side, with the clocks, heat and errors that explain why one differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards import rules, words
from dashboards.findings import docs_variable, findings
from dashboards.job import FINDINGS, run_marks
from dashboards.promql import PLACEMENT, of_chosen_gpus, of_chosen_jobs, per
from dashboards.widgets import (
    BYTES,
    CV,
    NONE_IS_GOOD,
    RATIO,
    SHARE,
    WATTS,
    Board,
    Look,
    Query,
    Section,
    bars,
    heatmap,
    lines,
    number,
    source_variable,
    states,
    table,
    variable,
)
from orchestrator import catalogue as c

if TYPE_CHECKING:
    from grafanalib import core as g

GPU = "{{node}} GPU {{gpu}}"
RATE = "[$__rate_interval]"
NEWEST = Look(unit="percentunit", low=0, high=1, limits=((0.05, "yellow"), (0.5, "green")), base="text")


def _balance() -> Section:
    def each(name: str, quantity: str) -> Query:
        return Query(expr=of_chosen_jobs(per(name, "job_id")), legend="{{job_id}} " + quantity)

    reported = of_chosen_jobs(per(c.JOB_GPU_BALANCE_CV.name, "job_id", "quantity"))
    least = of_chosen_jobs(per(c.JOB_GPU_BALANCE_MIN_PER_MEDIAN.name, "job_id", "quantity"))
    return Section(
        title="Balance of the chosen jobs",
        panels=(
            number(
                "Worst CV",
                "The worst coefficient of variation of the chosen jobs; above 20 % for five minutes, an alert fires.",
                Query(
                    expr=f"max({of_chosen_jobs(rules.cv('!=memory'))})",
                    legend="worst",
                ),
                missing=words.NO_BALANCE,
                look=CV,
                height=8,
            ),
            lines(
                "CV over time",
                "Standard deviation over mean across a job's GPUs. Under 5 % excellent, under 10 % good, under 20 % fair, "
                "else poor. Check batch sizes and data loading from 10 % on.",
                *(each(rules.cv(quantity), quantity) for quantity in rules.BALANCED),
                missing=words.NO_BALANCE,
                look=CV,
                bands=True,
                width=10,
            ),
            lines(
                "Least loaded GPU over the median",
                "Shows one uneven GPU among many, for which the CV is small.",
                *(each(rules.least_share(quantity), quantity) for quantity in rules.BALANCED),
                missing=words.NO_BALANCE,
                look=SHARE,
                width=10,
            ),
            table(
                "As the daemon sees it",
                "The daemon's own figures, computed from the same samples without Prometheus' recording rules.",
                Query(expr=reported),
                Query(expr=least),
                missing=words.NO_BALANCE,
                columns={"job_id": "Job", "quantity": "Quantity", "Value #A": "CV", "Value #B": "Least / median"},
                looks={"CV": CV, "Least / median": SHARE},
                width=12,
                height=6,
                sort="CV",
            ),
            table(
                "Silent GPUs",
                "GPUs that a job holds and that report nothing: they are missing from its balance.",
                Query(expr=of_chosen_jobs(rules.SILENT_GPUS)),
                missing="No job holds a silent GPU (valid only while the daemon is scraped)",
                columns={"job_id": "Job", "rank": "Rank", "gpu_uuid": "GPU"},
                width=12,
                height=6,
            ),
        ),
    )


def _side_by_side() -> Section:
    def newest(title: str, text: str, metric: c.Metric, look: Look) -> g.Panel:
        query = Query(expr=f"sort_desc({of_chosen_gpus(metric.name)})", legend=GPU, now=True)
        return bars(title, text, query, missing=words.NO_EXPORTER, look=look, width=8)

    return Section(
        title="GPUs side by side",
        panels=(
            newest("Utilization", "Share of time in which the GPU ran any work.", c.GPU_UTILIZATION, NEWEST),
            newest("Power", "Power draw now.", c.GPU_POWER, WATTS),
            newest("Memory in use", "Device memory in use now.", c.GPU_MEMORY_USED, BYTES),
            heatmap(
                "Utilization of every GPU",
                "One row per GPU: a straggler shows as a row of another colour, a stall as a column.",
                Query(expr=of_chosen_gpus(c.GPU_UTILIZATION.name), legend=GPU),
                missing=words.NO_EXPORTER,
                look=RATIO,
            ),
            lines(
                "Utilization",
                "Share of time in which the GPU ran any work: busy, not efficient.",
                Query(expr=of_chosen_gpus(c.GPU_UTILIZATION.name), legend=GPU),
                missing=words.NO_EXPORTER,
                look=RATIO,
            ),
            lines(
                "Power",
                "Ranks that wait in a collective spin at full utilization; only their power shows that they wait.",
                Query(expr=of_chosen_gpus(c.GPU_POWER.name), legend=GPU),
                missing=words.NO_EXPORTER,
                look=WATTS,
            ),
            lines(
                "Share of the power limit",
                "Power draw over the limit that the driver enforces.",
                Query(
                    expr=of_chosen_gpus(
                        f"{c.GPU_POWER.name} / on (gpu_uuid) {per(c.GPU_POWER_LIMIT.name, 'gpu_uuid')}"
                    ),
                    legend=GPU,
                ),
                missing=words.NOT_MEASURED,
                look=RATIO,
            ),
            lines(
                "Memory in use",
                "Share of the GPU's memory.",
                Query(
                    expr=of_chosen_gpus(
                        f"{c.GPU_MEMORY_USED.name} / on (gpu_uuid) {per(c.GPU_MEMORY_TOTAL.name, 'gpu_uuid')}"
                    ),
                    legend=GPU,
                ),
                missing=words.NO_EXPORTER,
                look=RATIO,
            ),
        ),
    )


def _heat() -> Section:
    room = per(c.GPU_TEMPERATURE_LIMIT.name, "gpu_uuid", "limit")
    return Section(
        title="Clocks, heat, throttling",
        panels=(
            states(
                "Throttling",
                "Reasons that hold a GPU's clocks down. A power cap is normal under load; heat and power brakes are not.",
                Query(
                    expr=of_chosen_gpus(f"{c.GPU_THROTTLE_ACTIVE.name}", "reason") + " > 0", legend=GPU + " {{reason}}"
                ),
                missing="No GPU is throttled (or the driver does not report it)",
                look=Look(words=((1, "throttled", "orange"),)),
            ),
            lines(
                "Time throttled",
                "Share of time in which the clocks were held down, by reason, from the driver's counters.",
                Query(expr=of_chosen_gpus(f"rate({c.GPU_THROTTLE.name}{RATE})", "reason"), legend=GPU + " {{reason}}"),
                missing=words.NOT_MEASURED,
                look=RATIO,
            ),
            lines(
                "Temperature",
                "Every sensor that the GPU has.",
                Query(expr=of_chosen_gpus(c.GPU_TEMPERATURE.name, "sensor"), legend=GPU + " {{sensor}}"),
                Query(expr=of_chosen_gpus(room, "limit"), legend=GPU + " limit: {{limit}}"),
                missing=words.NO_EXPORTER,
                look=Look(unit="celsius"),
            ),
            lines(
                "Clocks",
                "Clock frequency by domain.",
                Query(expr=of_chosen_gpus(c.GPU_CLOCK.name, "domain"), legend=GPU + " {{domain}}"),
                missing=words.NOT_MEASURED,
                look=Look(unit="hertz", low=0),
            ),
            lines(
                "Fan",
                "Fan speed over its maximum; GPUs cooled by their chassis have none.",
                Query(expr=of_chosen_gpus(c.GPU_FAN.name), legend=GPU),
                missing=words.NOT_MEASURED,
                look=RATIO,
            ),
        ),
    )


def _errors() -> Section:
    last = f"{c.GPU_XID_LAST_TIMESTAMP.name}[$__range]"
    newest = f"max_over_time({last})"
    times = f"changes({last}) + (min_over_time({last}) > bool time() - $__range_s)"
    return Section(
        title="Errors",
        panels=(
            table(
                "Xid events in this time range",
                "One row per GPU and Xid code: the time of the newest event and the number of events (those within "
                "one scrape count as one). The program causes 13, 31, 43, 45, 68 and 109, the GPU the others.",
                Query(expr=of_chosen_gpus(f"({newest} > time() - $__range_s)", "xid") + " * 1000"),
                Query(expr=of_chosen_gpus(f"({times} > 0)", "xid")),
                missing=words.NO_EVENTS,
                columns={"node": "Node", "gpu": "GPU", "xid": "Xid", "Value #A": "Newest", "Value #B": "Events"},
                looks={"Newest": Look(unit="dateTimeAsIso")},
                width=12,
            ),
            lines(
                "Xid events over time",
                "Events per second, from the exporter's counter. The first event of a code starts its series and is "
                "only in the table.",
                Query(expr=of_chosen_gpus(f"rate({c.GPU_XID_ERRORS.name}{RATE})", "xid"), legend=GPU + " Xid {{xid}}"),
                missing=words.NO_EVENTS,
                look=Look(unit="ops", low=0),
            ),
            lines(
                "Memory errors",
                "Corrected errors are harmless in small numbers; an uncorrected error lost data.",
                Query(
                    expr=of_chosen_gpus(f"increase({c.GPU_ECC_ERRORS.name}{RATE})", "severity", "scope"),
                    legend=GPU + " {{severity}} {{scope}}",
                ),
                missing=words.NOT_MEASURED,
                look=NONE_IS_GOOD,
            ),
            lines(
                "Remapped rows",
                "Memory rows replaced by spares. pending: reset the GPU; failure: replace it.",
                Query(expr=of_chosen_gpus(c.GPU_REMAPPED_ROWS.name, "cause"), legend=GPU + " {{cause}}"),
                missing=words.NOT_MEASURED,
                look=NONE_IS_GOOD,
            ),
        ),
    )


def _traffic() -> Section:
    def both(sent: c.Metric, received: c.Metric) -> tuple[Query, Query]:
        def moved(metric: c.Metric) -> str:
            return of_chosen_gpus(f"sum by (gpu_uuid) (rate({metric.name}{RATE}))")

        return Query(expr=moved(sent), legend=GPU + " sent"), Query(expr=moved(received), legend=GPU + " received")

    rate = Look(unit="Bps", low=0)
    return Section(
        title="Traffic and exporters",
        panels=(
            lines(
                "PCIe",
                "Bytes a second over PCIe.",
                *both(c.GPU_PCIE_TRANSMIT, c.GPU_PCIE_RECEIVE),
                missing=words.NOT_MEASURED,
                look=rate,
            ),
            lines(
                "NVLink",
                "Bytes a second over all links.",
                *both(c.GPU_NVLINK_TRANSMIT, c.GPU_NVLINK_RECEIVE),
                missing=words.NOT_MEASURED,
                look=rate,
            ),
            lines(
                "Memory activity",
                "Share of time in which device memory was read or written; not memory in use.",
                Query(expr=of_chosen_gpus(c.GPU_MEMORY_ACTIVITY.name), legend=GPU),
                missing=words.NOT_MEASURED,
                look=RATIO,
            ),
            lines(
                "Cost and age of readings",
                "How long the newest reading took, and how old it is.",
                Query(expr=of_chosen_gpus(c.EXPORTER_COLLECT_DURATION.name), legend=GPU + " took"),
                Query(expr=of_chosen_gpus(f"time() - {c.EXPORTER_LAST_SUCCESS_TIMESTAMP.name}"), legend=GPU + " age"),
                missing=words.NO_EXPORTER,
                look=Look(unit="s", low=0),
            ),
            states(
                "Exporters",
                "Whether the GPU answers its exporter. At 0 all its other series are absent.",
                Query(
                    expr=per(f'{c.EXPORTER_UP.name}{{node=~"$node",gpu_uuid=~"$gpu"}}', "gpu_uuid", "gpu", "node"),
                    legend=GPU,
                ),
                missing=words.NO_EXPORTER,
                look=Look(words=((0, "lost", "red"), (1, "answers", "green"))),
                width=12,
            ),
            lines(
                "Memory by process",
                "Device memory of each process. The exporter reports it only with ORCH_EXPORTER_PROCESSES=yes.",
                Query(expr=of_chosen_gpus(c.GPU_PROCESS_MEMORY.name, "pid"), legend=GPU + " pid {{pid}}"),
                missing="Not enabled on the exporter: it makes one series per process",
                look=BYTES,
            ),
        ),
    )


BOARD = Board(
    uid="orch-gpu-balance",
    title="orch / GPU balance",
    description="GPUs side by side: load, power, heat, errors, and how evenly each job loads its GPUs.",
    sections=(findings(FINDINGS), _balance(), _side_by_side(), _heat(), _errors(), _traffic()),
    variables=(
        source_variable(),
        # .* and not .+: with All, GPUs that no job holds are shown too
        variable("queue", "Queue", f"label_values({c.JOB_INFO.name}, queue)", all_value=".*"),
        variable("user", "User", f'label_values({c.JOB_INFO.name}{{queue=~"$queue"}}, user)', all_value=".*"),
        variable(
            "job_id",
            "Job",
            f'label_values({c.JOB_INFO.name}{{queue=~"$queue",user=~"$user"}}, job_id)',
            all_value=".*",
        ),
        variable("node", "Node", f"label_values({c.GPU_INFO.name}, node)"),
        variable("gpu", "GPU", f'label_values({PLACEMENT}{{node=~"$node",job_id=~"$job_id"}}, gpu_uuid)'),
        docs_variable(),
    ),
    annotations=run_marks(),
)
