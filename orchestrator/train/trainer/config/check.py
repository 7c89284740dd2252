"""job.yaml's `trainer:` checked where the job is submitted: all that is wrong, before anything waits in a queue.

Pure, and without torch: the daemon calls it. What only the ranks can know (their GPUs' abilities) they check themselves.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from orchestrator.spec.model import ElasticWorkers
from orchestrator.spec.reader.checks import Finding
from orchestrator.train.errors import ConfigError
from orchestrator.train.trainer.config import rules as config_rules
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.config.sources import sort_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from orchestrator.spec.model import JobSpec

_PLACES = ("rank", "world_size", "local_rank")


def trainer_findings(spec: JobSpec) -> Iterator[Finding]:
    """Everything wrong with `trainer:`, by itself and with the rest of the job file."""
    given = dict(spec.trainer)
    if not given:
        return
    for name in _PLACES:
        if given.pop(name, None) is not None:
            yield Finding(path=("trainer", name), message="orch tells the ranks", hint="leave it out")
    values, unreadable = sort_out(MultiGPUConfig, given)
    for name, problem in unreadable.items():
        yield _finding(problem, {name: None})
    ranks, most = _ranks(spec)
    try:
        config = MultiGPUConfig(**values, world_size=None if most else ranks)
    except ConfigError as error:
        problems: Iterable[str] = error.problems
    else:
        problems = _with_the_job(config, spec, ranks, most)
    for problem in config_rules.not_about(unreadable, problems):
        yield _finding(problem, given)


def _ranks(spec: JobSpec) -> tuple[int | None, int | None]:
    """How many there will be, or at least, None when that is not known yet; and the most of an elastic job."""
    workers = spec.resources.num_workers
    if workers == "auto":
        return None, None
    return (workers.min, workers.max) if isinstance(workers, ElasticWorkers) else (workers, None)


def _with_the_job(config: MultiGPUConfig, spec: JobSpec, ranks: int | None, most: int | None) -> Iterator[str]:
    if config.checkpoint_frequency is not None and spec.checkpoint.interval != "auto":
        yield "checkpoint_frequency and checkpoint.interval both say when to save: keep one"
    if ranks is None:
        return
    gpus = spec.resources.resources_per_worker.gpu
    around = config_rules.Surroundings(
        world_size=ranks,
        local_rank=0,
        cuda_devices=math.ceil(ranks * gpus),
        on_cuda=gpus > 0,
        computes_bf16=True,
        computes_fp8=True,
        most_ranks=most,
    )
    yield from config_rules.conflicts_with_place(config, around)


def _finding(problem: str, written: Mapping[str, object]) -> Finding:
    """The problem, placed at the first setting in the file that it speaks of."""
    names = [word for word in re.findall(r"[a-z0-9_]+", problem) if word in written]
    message, _, hint = problem.partition(": ")
    return Finding(path=("trainer", *names[:1]), message=message, hint=hint)
