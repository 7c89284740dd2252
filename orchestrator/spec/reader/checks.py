"""Rules that bind several keys of a job file.

Pure: takes a finished spec, returns findings, each with its path. Must not read text.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from orchestrator.spec.entrypoint import EntrypointError, parse_entrypoint
from orchestrator.spec.matrix import matrix_faults
from orchestrator.spec.model import ElasticWorkers
from orchestrator.spec.problems import Finding, quoted
from orchestrator.spec.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.spec.model import JobSpec
    from orchestrator.spec.problems import Path


def cross_checks(spec: JobSpec) -> Iterator[Finding]:
    """Yield a finding for every rule between keys that a spec breaks."""
    yield from _entrypoint(spec)
    yield from _resources(spec)
    yield from _times(spec)
    yield from _names(spec)
    yield from _checkpoint(spec)
    if spec.matrix is not None:
        for path, message, hint in matrix_faults(spec.matrix):
            yield Finding(path=path, message=message, hint=hint, others=(("matrix", "parameters"),))


def _entrypoint(spec: JobSpec) -> Iterator[Finding]:
    try:
        entrypoint = parse_entrypoint(spec.entrypoint)
    except EntrypointError as error:
        yield Finding(path=("entrypoint",), message=error.message, hint=error.hint)
        return
    if entrypoint.kind != "script" or spec.working_dir is None:
        return
    if posixpath.normpath(entrypoint.target).split("/")[0] == "..":
        message = f"{quoted(entrypoint.target)} is outside working_dir, which is all that is copied"
        yield Finding(
            path=("entrypoint",),
            message=message,
            hint="set working_dir to a directory that holds the script",
            others=(("working_dir",),),
        )


def _resources(spec: JobSpec) -> Iterator[Finding]:
    resources = spec.resources
    workers, each = resources.num_workers, resources.resources_per_worker
    place: Path = ("resources", "resources_per_worker")
    if isinstance(workers, ElasticWorkers) and workers.min > workers.max:
        message = f"min is {workers.min}, more than max, {workers.max}"
        yield Finding(path=("resources", "num_workers"), message=message, hint="exchange them")
    if each.gpu > 1 and not each.gpu.is_integer():
        message = f"{each.gpu:g} GPUs: above 1 the number must be whole"
        yield Finding(path=(*place, "gpu"), message=message, hint="write 1, 2, ..., or a fraction below 1 to share one")
    if each.gpu == 0 and each.gpu_model is not None:
        message = "a GPU model, but no GPU"
        yield Finding(path=(*place, "gpu_model"), message=message, hint="remove gpu_model, or write gpu: 1")
    auto = resources.auto
    if each.gpu == 0 and workers == "auto" and (auto is None or auto.advice is None):
        message = "auto counts free GPUs, but gpu is 0"
        hint = "write a number of ranks, or submit it with --advise"
        yield Finding(path=("resources", "num_workers"), message=message, hint=hint)
    if auto is not None and workers != "auto":
        message = "limits and advice of num_workers: auto, which is not written"
        yield Finding(
            path=("resources", "auto"),
            message=message,
            hint="write num_workers: auto, or leave auto out",
            others=(("resources", "num_workers"),),
        )
    if auto is not None and auto.min > auto.max:
        message = f"min is {auto.min}, more than max, {auto.max}"
        yield Finding(path=("resources", "auto"), message=message, hint="exchange them")


def _times(spec: JobSpec) -> Iterator[Finding]:
    backoff = spec.retry.backoff
    if backoff.initial > backoff.max:
        message = f"initial is {format_duration(backoff.initial)}, longer than max, {format_duration(backoff.max)}"
        yield Finding(path=("retry", "backoff"), message=message, hint="raise max or lower initial")
    if spec.min_runtime is not None and spec.max_duration is not None and spec.min_runtime > spec.max_duration:
        message = f"longer than max_duration, {format_duration(spec.max_duration)}"
        yield Finding(
            path=("min_runtime",), message=message, hint="write preemptible: false if it is never to be preempted"
        )


def _names(spec: JobSpec) -> Iterator[Finding]:
    for index, name in enumerate(spec.secrets):
        if name in spec.env:
            yield Finding(path=("secrets", index), message=f"{name} is in env too", hint="remove it from one of them")
    for index, dependency in enumerate(spec.depends_on):
        if dependency.job == spec.name:
            message = "the job would wait for itself"
            yield Finding(
                path=("depends_on", index, "job"), message=message, hint="name another job", others=(("name",),)
            )
        elif any(other.job == dependency.job for other in spec.depends_on[:index]):
            message = f"{quoted(dependency.job)} is named twice"
            yield Finding(path=("depends_on", index, "job"), message=message, hint="name each job once")
    for index, hook in enumerate(spec.notify):
        if not hook.on:
            yield Finding(path=("notify", index, "on"), message="no state is named", hint="write on: [FAILED]")


def _checkpoint(spec: JobSpec) -> Iterator[Finding]:
    attribute, order = spec.checkpoint.score_attribute, spec.checkpoint.score_order
    if attribute is None and order is not None:
        message = "an order without score_attribute"
        yield Finding(
            path=("checkpoint", "score_order"),
            message=message,
            hint="name the metric: score_attribute: loss",
            others=(("checkpoint", "score_attribute"),),
        )
    if attribute is None and spec.checkpoint.keep_best is not None:
        yield Finding(
            path=("checkpoint", "keep_best"),
            message="which checkpoints are the best is not specified",
            hint="name the metric: score_attribute: loss",
            others=(("checkpoint", "score_attribute"),),
        )
    if attribute is not None and order is None:
        message = f"whether a low or a high {quoted(attribute)} is better is not specified"
        yield Finding(
            path=("checkpoint", "score_attribute"),
            message=message,
            hint="add score_order: min, or max",
            others=(("checkpoint", "score_order"),),
        )
