"""One table of every metric: name, type, labels, unit, help and exporter.

Exporters, collectors, dashboards, rules and docs take names from here and from nowhere else, so a renamed metric is a
type error and not an empty panel. The table is data only: it imports nothing of the project, reads no clock and uses
no client library.

Conventions (prometheus.io, "metric and label naming"): base units, ratios from 0 to 1, `_total` on counters, `_info` on
identity series whose value is always 1. A series of a GPU carries `gpu_uuid` and nothing else that identifies it; its
other properties are on `orch_gpu_info`, the job that runs on it on `orch_job_gpu`, and queries join on `gpu_uuid`. No
label is ever named `job` or `instance`: Prometheus puts those on every scraped series itself.

`python -m orchestrator.catalogue docs/monitoring.md` writes the table of that page.

A constant is the name without `orch_`, `_total` and the unit: `orch_gpu_energy_joules_total` is `GPU_ENERGY`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

MetricType = Literal["gauge", "counter", "histogram"]
"""The word that Prometheus prints after `# TYPE`."""

Owner = Literal["gpu", "job", "totals", "daemon"]
"""The exporter: a GPU's exporter, or the daemon (per job with a live attempt, over everything, about itself)."""

Unit = Literal["", "ratio", "bytes", "watts", "joules", "celsius", "hertz", "seconds"]
"""Base unit of the value; empty for counts and for series whose value is always 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric family: a row of the table.

    `labels` are in the order in which exporters print them. `buckets` are the upper bounds of a histogram in its unit,
    without `+Inf`; empty for every other type.
    """

    name: str
    type: MetricType
    labels: tuple[str, ...]
    unit: Unit
    help: str
    owner: Owner
    buckets: tuple[float, ...] = ()


def _gauge(name: str, labels: tuple[str, ...], unit: Unit, owner: Owner, text: str) -> Metric:
    return Metric(name=name, type="gauge", labels=labels, unit=unit, help=text, owner=owner)


def _counter(name: str, labels: tuple[str, ...], unit: Unit, owner: Owner, text: str) -> Metric:
    return Metric(name=name, type="counter", labels=labels, unit=unit, help=text, owner=owner)


def _histogram(name: str, labels: tuple[str, ...], buckets: tuple[float, ...], text: str) -> Metric:
    return Metric(
        name=name, type="histogram", labels=labels, unit="seconds", help=text, owner="totals", buckets=buckets
    )


_GPU = ("gpu_uuid",)
_JOB = ("job_id",)

# ---------------------------------------------------------------------------------------------- a GPU, by its exporter

GPU_INFO: Final = _gauge(
    "orch_gpu_info",
    ("gpu_uuid", "gpu", "node", "vendor", "model", "pci_bus_id", "driver_version"),
    "",
    "gpu",
    "Identity of a GPU, always 1; join other series to it on gpu_uuid.",
)
GPU_UTILIZATION: Final = _gauge(
    "orch_gpu_utilization_ratio",
    _GPU,
    "ratio",
    "gpu",
    "Share of the driver's last sample period in which the GPU ran any work (busy, not efficient).",
)
GPU_MEMORY_ACTIVITY: Final = _gauge(
    "orch_gpu_memory_activity_ratio",
    _GPU,
    "ratio",
    "gpu",
    "Share of the driver's last sample period in which device memory was read or written; not memory in use.",
)
GPU_MEMORY_USED: Final = _gauge(
    "orch_gpu_memory_used_bytes", _GPU, "bytes", "gpu", "Device memory in use, the driver's reservation left out."
)
GPU_MEMORY_TOTAL: Final = _gauge("orch_gpu_memory_total_bytes", _GPU, "bytes", "gpu", "Device memory installed.")
GPU_POWER: Final = _gauge(
    "orch_gpu_power_watts", _GPU, "watts", "gpu", "Power draw: instantaneous where the driver has it, else averaged."
)
GPU_POWER_LIMIT: Final = _gauge(
    "orch_gpu_power_limit_watts", _GPU, "watts", "gpu", "Power limit that the driver enforces now."
)
GPU_ENERGY: Final = _counter(
    "orch_gpu_energy_joules_total", _GPU, "joules", "gpu", "Energy used, from the hardware's own counter."
)
GPU_TEMPERATURE: Final = _gauge(
    "orch_gpu_temperature_celsius", ("gpu_uuid", "sensor"), "celsius", "gpu", "Temperature of a sensor."
)
GPU_TEMPERATURE_LIMIT: Final = _gauge(
    "orch_gpu_temperature_limit_celsius",
    ("gpu_uuid", "sensor", "limit"),
    "celsius",
    "gpu",
    "Temperature at which the GPU slows down, shuts down or is past its rating.",
)
GPU_FAN: Final = _gauge("orch_gpu_fan_ratio", _GPU, "ratio", "gpu", "Fan speed as a share of its maximum.")
GPU_CLOCK: Final = _gauge(
    "orch_gpu_clock_hertz", ("gpu_uuid", "domain"), "hertz", "gpu", "Clock frequency of a domain."
)
GPU_THROTTLE_ACTIVE: Final = _gauge(
    "orch_gpu_throttle_active",
    ("gpu_uuid", "reason"),
    "",
    "gpu",
    "1 while the clocks are held down for this reason, else 0.",
)
GPU_THROTTLE: Final = _counter(
    "orch_gpu_throttle_seconds_total",
    ("gpu_uuid", "reason"),
    "seconds",
    "gpu",
    "Time for which the clocks were held down for this reason, from the driver's counter.",
)
GPU_ECC_ERRORS: Final = _counter(
    "orch_gpu_ecc_errors_total",
    ("gpu_uuid", "severity", "scope"),
    "",
    "gpu",
    "Memory errors counted by the GPU: corrected or uncorrected; volatile (since the driver loaded) or aggregate.",
)
GPU_REMAPPED_ROWS: Final = _gauge(
    "orch_gpu_remapped_rows",
    ("gpu_uuid", "cause"),
    "",
    "gpu",
    "Memory rows replaced by spares, by cause; pending and failure are 0 or 1.",
)
GPU_XID_ERRORS: Final = _counter(
    "orch_gpu_xid_errors_total", ("gpu_uuid", "xid"), "", "gpu", "Xid events since the exporter started."
)
GPU_XID_LAST_TIMESTAMP: Final = _gauge(
    "orch_gpu_xid_last_timestamp_seconds",
    ("gpu_uuid", "xid"),
    "seconds",
    "gpu",
    "Unix time of the newest Xid event of this code.",
)
GPU_PCIE_TRANSMIT: Final = _counter(
    "orch_gpu_pcie_transmit_bytes_total", _GPU, "bytes", "gpu", "Bytes that the GPU sent over PCIe."
)
GPU_PCIE_RECEIVE: Final = _counter(
    "orch_gpu_pcie_receive_bytes_total", _GPU, "bytes", "gpu", "Bytes that the GPU received over PCIe."
)
GPU_NVLINK_TRANSMIT: Final = _counter(
    "orch_gpu_nvlink_transmit_bytes_total",
    ("gpu_uuid", "link"),
    "bytes",
    "gpu",
    "Bytes that the GPU sent over an NVLink.",
)
GPU_NVLINK_RECEIVE: Final = _counter(
    "orch_gpu_nvlink_receive_bytes_total",
    ("gpu_uuid", "link"),
    "bytes",
    "gpu",
    "Bytes that the GPU received over an NVLink.",
)
GPU_PROCESS_MEMORY: Final = _gauge(
    "orch_gpu_process_memory_bytes",
    ("gpu_uuid", "pid"),
    "bytes",
    "gpu",
    "Device memory of a process (only if requested: one series per process).",
)
EXPORTER_UP: Final = _gauge(
    "orch_exporter_up",
    ("gpu_uuid", "gpu", "node"),
    "",
    "gpu",
    "1 while the GPU answers its exporter; at 0 every other series of that GPU is absent.",
)
EXPORTER_COLLECT_DURATION: Final = _gauge(
    "orch_exporter_collect_duration_seconds", _GPU, "seconds", "gpu", "How long the newest complete reading took."
)
EXPORTER_LAST_SUCCESS_TIMESTAMP: Final = _gauge(
    "orch_exporter_last_success_timestamp_seconds", _GPU, "seconds", "gpu", "Unix time of the newest complete reading."
)
EXPORTER_READ_ERRORS: Final = _counter(
    "orch_exporter_read_errors_total", _GPU, "", "gpu", "Readings that failed as a whole since the exporter started."
)

# ------------------------------------------------------------------- a job with a live attempt (and 15 minutes after)

JOB_INFO: Final = _gauge(
    "orch_job_info", ("job_id", "name", "user", "queue"), "", "job", "Identity of a job, always 1; join on job_id."
)
JOB_GPU: Final = _gauge(
    "orch_job_gpu",
    ("job_id", "gpu_uuid", "rank"),
    "",
    "job",
    "A GPU that a rank of the job runs on, always 1; exact, from the placement, also when a GPU is shared.",
)
JOB_GPUS: Final = _gauge("orch_job_gpus", _JOB, "", "job", "GPUs that the job holds, whether they report or not.")
JOB_STATE: Final = _gauge(
    "orch_job_state", ("job_id", "state"), "", "job", "1 for the state that the job is in, 0 for every other."
)
JOB_STEP: Final = _gauge("orch_job_step", _JOB, "", "job", "Newest optimizer step that rank 0 reported.")
JOB_PROGRESS: Final = _gauge(
    "orch_job_progress_ratio", _JOB, "ratio", "job", "Newest step over total steps, where the script reports both."
)
JOB_SAMPLES: Final = _counter("orch_job_samples_total", _JOB, "", "job", "Training samples reported by the script.")
JOB_TOKENS: Final = _counter("orch_job_tokens_total", _JOB, "", "job", "Training tokens reported by the script.")
JOB_MFU: Final = _gauge(
    "orch_job_mfu_ratio", _JOB, "ratio", "job", "Model FLOP/s over the GPUs' peak; absent when the peak is unknown."
)
JOB_METRIC: Final = _gauge(
    "orch_job_metric", ("job_id", "name"), "", "job", "Newest value the script reported under this name."
)
JOB_RANK_STEP: Final = _gauge(
    "orch_job_rank_step_seconds",
    ("job_id", "rank"),
    "seconds",
    "job",
    "Median time of a rank's newest steps, as it reports them; ranks in lockstep all show the slowest rank's.",
)
JOB_HEARTBEAT_TIMESTAMP: Final = _gauge(
    "orch_job_heartbeat_timestamp_seconds",
    _JOB,
    "seconds",
    "job",
    "Unix time of the newest sign of life of the job's slowest rank.",
)
JOB_HANG_SUSPECTED: Final = _gauge(
    "orch_job_hang_suspected",
    _JOB,
    "",
    "job",
    "1 while a rank has been still for longer than its own step times allow.",
)
JOB_RESTARTS: Final = _counter(
    "orch_job_restarts_total", ("job_id", "class"), "", "job", "Restarts of the job, by failure class."
)
JOB_GPU_BALANCE_CV: Final = _gauge(
    "orch_job_gpu_balance_cv",
    ("job_id", "quantity"),
    "ratio",
    "job",
    "Population standard deviation over mean across the job's GPUs, one minute; absent for one GPU or an idle job.",
)
JOB_GPU_BALANCE_MIN_PER_MEDIAN: Final = _gauge(
    "orch_job_gpu_balance_min_per_median",
    ("job_id", "quantity"),
    "ratio",
    "job",
    "Least loaded GPU over the median GPU of the job, one minute; absent where the CV is.",
)
JOB_GPU_SILENT: Final = _gauge(
    "orch_job_gpu_silent", _JOB, "", "job", "GPUs of the job without a fresh sample; they are missing from its balance."
)
JOB_GPU_TIME: Final = _counter(
    "orch_job_gpu_seconds_total",
    ("job_id", "phase"),
    "seconds",
    "job",
    "GPU time that the job held, by phase, in GPU seconds.",
)
JOB_CHECKPOINT_TIMESTAMP: Final = _gauge(
    "orch_job_checkpoint_timestamp_seconds", _JOB, "seconds", "job", "Unix time of the newest complete checkpoint."
)
JOB_CHECKPOINT_INTERVAL: Final = _gauge(
    "orch_job_checkpoint_interval_seconds", _JOB, "seconds", "job", "Interval at which the job is set to save."
)
FINDING: Final = _gauge(
    "orch_finding",
    ("kind", "job_id", "rank", "gpu_uuid", "node"),
    "",
    "job",
    "1 for each finding of diagnosis that is open now; rank, gpu_uuid and node are empty where it is about none.",
)
JOB_EVENT_TIMESTAMP: Final = _gauge(
    "orch_job_event_timestamp_seconds",
    ("job_id", "event"),
    "seconds",
    "job",
    "Unix time of the newest event of this kind, for annotations.",
)

# ------------------------------------------------------------------------------------- everything together, by the daemon

JOBS: Final = _gauge("orch_jobs", ("queue", "state"), "", "totals", "Jobs in a state that is not terminal.")
JOBS_FINISHED: Final = _counter(
    "orch_jobs_finished_total",
    ("queue", "state", "class"),
    "",
    "totals",
    "Jobs that ended; class says why one failed and is empty for the others.",
)
GPUS: Final = _gauge(
    "orch_gpus", ("node", "state"), "", "totals", "GPUs by state: busy, idle, broken (silent or lost), cordoned."
)
NODES: Final = _gauge("orch_nodes", ("state",), "", "totals", "Nodes by state: ready, cordoned, draining, unreachable.")
QUEUE_OLDEST_PENDING: Final = _gauge(
    "orch_queue_oldest_pending_seconds", ("queue",), "seconds", "totals", "Age of the job that has waited longest."
)
GPU_SECONDS: Final = _counter(
    "orch_gpu_seconds_total",
    ("queue", "phase"),
    "seconds",
    "totals",
    "The goodput ledger in GPU seconds: starting, productive, lost, checkpoint_stall, recovering, draining.",
)
GPU_SECONDS_UNCOMMITTED: Final = _gauge(
    "orch_gpu_seconds_uncommitted",
    ("queue",),
    "seconds",
    "totals",
    "GPU seconds of steps that no checkpoint covers yet; they become productive or lost.",
)
QUEUE_WAIT: Final = _histogram(
    "orch_queue_wait_seconds",
    ("queue",),
    (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0),
    "From acceptance of a job to the start of its first attempt.",
)
SCHEDULING: Final = _histogram(
    "orch_scheduling_seconds",
    (),
    (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "One decision of the scheduler over the whole state.",
)
SUBMISSION: Final = _histogram(
    "orch_submission_seconds",
    (),
    (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "From the arrival of a submission to its durable acknowledgement.",
)

# ----------------------------------------------------------------------------------------------- the daemon about itself

DAEMON_INFO: Final = _gauge("orch_daemon_info", ("version", "node"), "", "daemon", "The daemon that runs, always 1.")
DAEMON_START_TIMESTAMP: Final = _gauge(
    "orch_daemon_start_timestamp_seconds", (), "seconds", "daemon", "Unix time at which the daemon started."
)
DAEMON_LOOP_LAG: Final = _gauge(
    "orch_daemon_loop_lag_seconds",
    (),
    "seconds",
    "daemon",
    "How late the daemon's event loop woke up at most, in the last 15 seconds.",
)
STORE_COMMIT_FAILURES: Final = _counter(
    "orch_store_commit_failures_total", (), "", "daemon", "Transactions that the store could not commit."
)
DISK_FREE: Final = _gauge(
    "orch_disk_free_bytes", ("node", "path"), "bytes", "daemon", "Free space where the daemon keeps its state."
)
DISK_SIZE: Final = _gauge(
    "orch_disk_size_bytes", ("node", "path"), "bytes", "daemon", "Size of the filesystem that holds the state."
)

METRICS: Final[tuple[Metric, ...]] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""Every metric, in the order of this page."""

# --------------------------------------------------------------------------------------- the table of docs/monitoring.md

BEGIN: Final = "<!-- metrics: generated from orchestrator/catalogue.py, do not edit -->"
END: Final = "<!-- end of metrics -->"
_OWNERS: Final = (
    ("gpu", "GPUs, from each GPU's exporter"),
    ("job", "Jobs with a live attempt, and for 15 minutes after, from the daemon"),
    ("totals", "Queues and totals, from the daemon"),
    ("daemon", "The daemon about itself"),
)


def table() -> str:
    """Return all metrics as Markdown, a section per owner."""
    lines: list[str] = []
    for owner, title in _OWNERS:
        lines += [f"### {title}", "", "| Metric | Type | Unit | What it says |", "|---|---|---|---|"]
        lines += [_row(metric) for metric in METRICS if metric.owner == owner]
        lines.append("")
    return "\n".join(lines)


def _row(metric: Metric) -> str:
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    return f"| `{metric.name}{labels}` | {metric.type} | {metric.unit or '–'} | {metric.help} |"


def with_table(document: str) -> str:
    """Return the document with its table renewed. Raises ValueError where the marks that enclose it are missing."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table()}{END}{after}"


def main() -> None:
    """Renew the table in the file that is named."""
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
