"""PromQL expressions that boards and rules share: selectors, and joins with their "many" side and labels.

Thresholds and texts are in the rules and the boards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator import catalogue as c

if TYPE_CHECKING:
    from orchestrator.catalogue import Metric

GPU_IDENTITY = "gpu_uuid_gpu_node:orch_gpu_info:last1h"
"""Recorded number and node of a GPU, until an hour after it went silent; one series per GPU, even if labels change."""

PLACEMENT = "gpu:orch_gpu_info:placed"
"""Recorded number and node of a GPU and the job that holds it; one series per job when jobs share it. While no job
holds it, `job_id`, `queue` and `user` are missing: `.*` matches that, for boards of all GPUs, and `.+` does not."""


def selector(metric: Metric, **labels: str) -> str:
    """Return `metric{label="value",...}`; a value that begins with `=~`, `!=` or `!~` has its own operator."""
    unknown = set(labels) - set(metric.labels)
    if unknown:
        raise ValueError(f"{metric.name} has no label {', '.join(sorted(unknown))}: see orchestrator/catalogue.py")
    parts = []
    for label, value in labels.items():
        operator, text = (value[:2], value[2:]) if value[:2] in ("=~", "!=", "!~") else ("=", value)
        parts.append(f'{label}{operator}"{text}"')
    return metric.name + (f"{{{','.join(parts)}}}" if parts else "")


def per(expression: str, *labels: str) -> str:
    """Return the maximum of the expression by `labels`: series of two daemons or two exporters count once."""
    return f"max by ({', '.join(labels)}) ({expression})"


def on_gpus_of_jobs(expression: str) -> str:
    """Return a value per GPU, once for each job that holds that GPU.

    The assignment is the "many" side, so a GPU that two jobs share does not break the join.
    """
    return f"{per(c.JOB_GPU.name, 'job_id', 'gpu_uuid')} * on (gpu_uuid) group_left () {per(expression, 'gpu_uuid')}"


def named_job(expression: str) -> str:
    """Return a value per job, with the job's name, user and queue; values are unchanged."""
    identity = per(c.JOB_INFO.name, "job_id", "name", "user", "queue")
    return f"{expression} * on (job_id) group_left (name, user, queue) {identity}"


def named_gpu(expression: str) -> str:
    """Return a value per GPU, with the GPU's number and node; values are unchanged."""
    return f"{expression} * on (gpu_uuid) group_left (gpu, node) {GPU_IDENTITY}"


def only_running(expression: str) -> str:
    """Restrict a value per job to jobs in state RUNNING: starting, recovering and draining jobs are left out."""
    return f"{expression} and on (job_id) {selector(c.JOB_STATE, state='RUNNING')} == 1"


def of_chosen_jobs(expression: str) -> str:
    """Restrict a value per job to jobs of the chosen queues, users and ids."""
    chosen = selector(c.JOB_INFO, queue="=~$queue", user="=~$user", job_id="=~$job_id")
    return f"{expression} and on (job_id) {chosen}"


def of_chosen_owners(expression: str) -> str:
    """Restrict a value per job to jobs of the chosen queues and users, on a board that has no choice of jobs."""
    chosen = selector(c.JOB_INFO, queue="=~$queue", user="=~$user")
    return f"{expression} and on (job_id) {chosen}"


def of_ranks(expression: str) -> str:
    """Return a value per GPU, once for each chosen job's rank that holds it, with job, rank, node and the GPU's number.

    The rank is the "many" side of both joins, so a GPU that two ranks share does not break them.
    """
    ranks = of_chosen_jobs(per(c.JOB_GPU.name, "job_id", "gpu_uuid", "rank"))
    return f"{named_gpu(f'({ranks})')} * on (gpu_uuid) group_left () {per(expression, 'gpu_uuid')}"


def of_chosen_gpus(expression: str, *labels: str, node: bool = True) -> str:
    """Return a value per chosen GPU (and per `labels`), with the GPU's number and node; values are unchanged.

    `node` False leaves the choice of node and GPU out, for boards that have none.
    """
    chosen = 'queue=~"$queue",user=~"$user",job_id=~"$job_id"' + (',node=~"$node",gpu_uuid=~"$gpu"' if node else "")
    where = f"max by (gpu_uuid, gpu, node) ({PLACEMENT}{{{chosen}}})"
    return f"{per(expression, 'gpu_uuid', *labels)} * on (gpu_uuid) group_left (gpu, node) {where}"
