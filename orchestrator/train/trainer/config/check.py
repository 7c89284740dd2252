"""Finds all contradictions in job.yaml's `trainer:` at submission, before the job waits in a queue.

Pure, and without torch: the daemon calls it. The reader of job.yaml checks each setting by itself. The ranks check
what depends on their hardware (their GPUs' abilities).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.spec.model import ElasticWorkers
from orchestrator.spec.problems import Finding
from orchestrator.spec.trainer import TrainingSettings
from orchestrator.train.trainer.config import rules
from orchestrator.train.trainer.config.config import filled_in
from orchestrator.train.trainer.config.sources import sort_out

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from orchestrator.spec.model import JobSpec

_PLACES = ("rank", "world_size", "local_rank")


def trainer_findings(spec: JobSpec) -> Iterator[Finding]:
    """Return everything wrong with `trainer:` as a whole, by itself and with the rest of the job file."""
    if not spec.trainer:
        return
    given, _ = sort_out(spec.trainer, typed=True)
    for name in _PLACES:
        if given.pop(name, None) is not None:
            yield Finding(path=("trainer", name), message="orch tells the ranks", hint="leave it out")
    ranks, most = _ranks(spec)
    settings = TrainingSettings(**given, world_size=None if most else ranks)
    findings = [*rules.disagreeing_aliases(settings)]
    settings = replace(settings, **filled_in(settings))
    findings = [*findings, *rules.conflicts(settings)] or [*_with_the_job(settings, spec, ranks, most)]
    yield from (_placed(finding, spec.trainer.keys()) for finding in findings)


def _ranks(spec: JobSpec) -> tuple[int | None, int | None]:
    """Return the number of ranks, or the minimum, None while unknown; and the maximum of an elastic job."""
    workers = spec.resources.num_workers
    if workers == "auto":
        return None, None
    return (workers.min, workers.max) if isinstance(workers, ElasticWorkers) else (workers, None)


def _with_the_job(settings: TrainingSettings, spec: JobSpec, ranks: int | None, most: int | None) -> Iterator[Finding]:
    if settings.checkpoint_frequency is not None and spec.checkpoint.interval != "auto":
        message = "checkpoint_frequency and checkpoint.interval both say when to save"
        yield rules.about("checkpoint_frequency", message=message, hint="keep one")
    if ranks is None:
        return
    gpus = spec.resources.resources_per_worker.gpu
    around = rules.Surroundings(
        world_size=ranks,
        local_rank=0,
        cuda_devices=math.ceil(ranks * gpus),
        on_cuda=gpus > 0,
        computes_bf16=True,
        most_ranks=most,
    )
    yield from rules.conflicts_with_place(settings, around)


def _placed(finding: Finding, written: Collection[str]) -> Finding:
    """Return the finding, placed at the first of its settings that the file has."""
    names = rules.names_of(finding)
    first = next((name for name in names if name in written), None)
    others = tuple(("trainer", name) for name in names if name != first)
    path = ("trainer",) if first is None else ("trainer", first)
    return replace(finding, path=path, others=others)
