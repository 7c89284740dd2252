"""Small pieces of PromQL that boards and rules share.

Joins only: which side is "many", which labels survive. No thresholds and no texts live here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator import catalogue as c

if TYPE_CHECKING:
    from orchestrator.catalogue import Metric

GPU_IDENTITY = "gpu_uuid_gpu_node:orch_gpu_info:last1h"
"""Recorded: where a GPU is, for an hour after it fell silent; one series a GPU whatever happened to its labels."""

PLACEMENT = "gpu:orch_gpu_info:placed"
"""Recorded: where a GPU is and whose job holds it; once per job when it is shared. While none does, `job_id`, `queue`
and `user` are missing, which `.*` matches and `.+` does not: that tells boards of all GPUs from boards of jobs."""


def selector(metric: Metric, **labels: str) -> str:
    """`metric{label="value",...}`; a value that begins with `=~`, `!=` or `!~` brings its own operator."""
    unknown = set(labels) - set(metric.labels)
    if unknown:
        raise ValueError(f"{metric.name} has no label {', '.join(sorted(unknown))}: see orchestrator/catalogue.py")
    parts = []
    for label, value in labels.items():
        operator, text = (value[:2], value[2:]) if value[:2] in ("=~", "!=", "!~") else ("=", value)
        parts.append(f'{label}{operator}"{text}"')
    return metric.name + (f"{{{','.join(parts)}}}" if parts else "")


def per(expression: str, *labels: str) -> str:
    """The expression without the labels of its scrape: two daemons or exporters on the way count once."""
    return f"max by ({', '.join(labels)}) ({expression})"


def on_gpus_of_jobs(expression: str) -> str:
    """A value per GPU, once for each job that holds that GPU.

    The assignment is the "many" side, so a GPU that two jobs share does not break the join.
    """
    return f"{per(c.JOB_GPU.name, 'job_id', 'gpu_uuid')} * on (gpu_uuid) group_left () {per(expression, 'gpu_uuid')}"


def named_job(expression: str) -> str:
    """A value per job, with the job's name, user and queue; values are unchanged."""
    identity = per(c.JOB_INFO.name, "job_id", "name", "user", "queue")
    return f"{expression} * on (job_id) group_left (name, user, queue) {identity}"


def named_gpu(expression: str) -> str:
    """A value per GPU, with the GPU's number and node; values are unchanged."""
    return f"{expression} * on (gpu_uuid) group_left (gpu, node) {GPU_IDENTITY}"


def only_running(expression: str) -> str:
    """What remains of a value per job when starting, recovering and draining jobs are left out."""
    return f"{expression} and on (job_id) {selector(c.JOB_STATE, state='RUNNING')} == 1"


def of_chosen_jobs(expression: str) -> str:
    """What remains of a value per job when only jobs of the chosen queues, users and ids are kept."""
    chosen = selector(c.JOB_INFO, queue="=~$queue", user="=~$user", job_id="=~$job_id")
    return f"{expression} and on (job_id) {chosen}"


def of_chosen_owners(expression: str) -> str:
    """As `of_chosen_jobs`, on a board that has no choice of jobs."""
    chosen = selector(c.JOB_INFO, queue="=~$queue", user="=~$user")
    return f"{expression} and on (job_id) {chosen}"


def of_ranks(expression: str) -> str:
    """A value per GPU, once for each rank of the chosen jobs that holds it, with job, rank, node and the GPU's number.

    The rank is the "many" side of both joins, so a GPU that two ranks share does not break them.
    """
    ranks = of_chosen_jobs(per(c.JOB_GPU.name, "job_id", "gpu_uuid", "rank"))
    return f"{named_gpu(f'({ranks})')} * on (gpu_uuid) group_left () {per(expression, 'gpu_uuid')}"


def of_chosen_gpus(expression: str, *labels: str, node: bool = True) -> str:
    """A value per GPU (and per `labels`), with the GPU's number and node, of the chosen GPUs; values are unchanged.

    `node` False leaves the choice of node and GPU out, for boards that have none.
    """
    chosen = 'queue=~"$queue",user=~"$user",job_id=~"$job_id"' + (',node=~"$node",gpu_uuid=~"$gpu"' if node else "")
    where = f"max by (gpu_uuid, gpu, node) ({PLACEMENT}{{{chosen}}})"
    return f"{per(expression, 'gpu_uuid', *labels)} * on (gpu_uuid) group_left (gpu, node) {where}"
