"""Every setting of a training run: one frozen record, read from Python, YAML or the command line, and checked as a whole.

``spec.trainer`` defines the settings, and by their kinds each value is read here, without importing pydantic; rules.py
has the rules between them. Imports no torch: the daemon checks a job's `trainer:` at submission, before the job waits in
a queue, and the ranks check what depends on their hardware. A setting without effect is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from orchestrator.spec.fields import Boolean, Duration, keys_of, python_node, typed_node
from orchestrator.spec.model import ElasticWorkers
from orchestrator.spec.problems import BadValueError, Finding
from orchestrator.spec.reader.reading import unknown_key
from orchestrator.spec.trainer import TrainingMode, TrainingSettings
from orchestrator.train.errors import ConfigError, fail_once
from orchestrator.train.trainer.config import rules

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from orchestrator.spec.fields import Key
    from orchestrator.spec.model import JobSpec

_ALIASES = {"use_fp16_allreduce": "fp16_compression", "reduce_bucket_size": "bucket_cap_mb"}
_MIB = 1024 * 1024


def filled_in(given: TrainingSettings) -> dict[str, Any]:
    """Return the values of settings that follow from others, where they were not given."""
    compressed = bool(given.fp16_compression or given.use_fp16_allreduce)
    megabytes = given.bucket_cap_mb
    if megabytes is None:
        megabytes = 25.0 if given.reduce_bucket_size is None else given.reduce_bucket_size / _MIB
    lower = given.precision not in (None, "fp32") or bool(given.use_mixed_precision)
    return {
        "training_mode": TrainingMode(given.training_mode),
        "fp16_compression": compressed,
        "use_fp16_allreduce": compressed,
        "bucket_cap_mb": megabytes,
        "reduce_bucket_size": round(megabytes * _MIB),
        "use_mixed_precision": lower if given.use_mixed_precision is None else given.use_mixed_precision,
        "precision": given.precision or ("auto" if lower else "fp32"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiGPUConfig(TrainingSettings):
    """The settings of a training run. Raises ConfigError with every error, each with its remedy.

    A duration is a timedelta, a number of seconds, or text such as 5m. A default of None is filled in: from the launcher's environment
    (world_size, rank, local_rank), from the device (backend, pin_memory, precision auto), or from another field.
    docs/training.md lists unit, default and effect.
    """

    heard_job: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether job.yaml's `trainer:` is already included: not a setting; the manager adds it where it is not."""

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in settings()}
        values, wrong = sort_out(given, typed=False)
        # Settings that are invalid by themselves are excluded, so that all others are still checked.
        for name in given:
            object.__setattr__(self, name, values[name] if name in values else settings()[name].default)
        findings = [*rules.disagreeing_aliases(self)]
        for name, value in filled_in(self).items():  # frozen from here on
            object.__setattr__(self, name, value)
        findings += rules.conflicts(self)
        problems = [*map(sentence, wrong.items()), *map(rules.sentence, rules.not_about(wrong, findings))]
        if problems:
            asked_rank = given["rank"]
            raise fail_once(ConfigError(*problems), rank=asked_rank if isinstance(asked_rank, int) else None)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; derived values are computed again."""
        for alias, name in _ALIASES.items():
            if name in changes:
                changes.setdefault(alias, None)
            elif alias in changes:
                changes[name] = None
        if "precision" in changes:
            changes.setdefault("use_mixed_precision", None)
        elif "use_mixed_precision" in changes:
            changes["precision"] = None
        changed = dataclasses.replace(self, **changes)
        object.__setattr__(changed, "heard_job", self.heard_job)
        return changed

    def with_job(self) -> Self:
        """Return the configuration overridden by job.yaml's `trainer:`; itself outside of orch, or when that is already included.

        Raises ConfigError for contradictions between the two.
        """
        from_job = {} if self.heard_job else job_settings(os.environ)
        if not from_job:
            return self
        changed = self.replace(**read_mapping(from_job))
        object.__setattr__(changed, "heard_job", True)
        return changed

    @classmethod
    def from_job(cls, **defaults: Any) -> Self:
        """Read job.yaml's `trainer:`, over `defaults`. Raises ConfigError with every error."""
        return cls(**defaults).with_job()

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Read `trainer:` of job.yaml, or any mapping of names to values. Raises ConfigError with every error."""
        return cls(**read_mapping(given))

    @classmethod
    def from_args(cls, arguments: Sequence[str] | None = None, **defaults: Any) -> Self:
        """Read `--batch-size 64 --use-mixed-precision ...` from the command line, over job.yaml's `trainer:`, over `defaults`."""
        config = cls(**read_everything(arguments, defaults))
        object.__setattr__(config, "heard_job", True)
        return config

    @classmethod
    def development(cls, **changes: Any) -> Self:
        """Return settings for trying things out on one machine: all its GPUs in one process, mixed precision, two loader workers."""
        return cls(
            **{
                "training_mode": TrainingMode.DATA_PARALLEL,
                "use_mixed_precision": True,
                "num_workers": 2,
                "checkpoint_frequency": 100,
                **changes,
            }
        )

    @classmethod
    def production(cls, **changes: Any) -> Self:
        """Return settings for long runs: one process per GPU, mixed precision, accumulation, clipping, checkpoints."""
        return cls(
            **{
                "use_mixed_precision": True,
                "gradient_accumulation_steps": 1 if "global_batch_size" in changes else 4,
                "max_grad_norm": 1.0,
                "num_workers": 4,
                **changes,
            }
        )

    @classmethod
    def large_model(cls, **changes: Any) -> Self:
        """Return settings for models that fill the GPU: as production, with more accumulation and recomputed activations."""
        return cls.production(
            **{
                "gradient_accumulation_steps": 1 if "global_batch_size" in changes else 8,
                "use_gradient_checkpointing": True,
                "sync_bn": True,
                **changes,
            }
        )


def _refuse_change(config: MultiGPUConfig, name: str, value: object) -> None:
    """Raise FrozenInstanceError: other values were checked against this one, so a change needs a new object."""
    del config
    raise dataclasses.FrozenInstanceError(
        f"a MultiGPUConfig does not change: write config = config.replace({name}={value!r})"
    )


# Assigned after the decorator has run: it sets its own method, and the message of that is only the name.
MultiGPUConfig.__setattr__ = _refuse_change  # type: ignore[method-assign, assignment]


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


TRAINER_VARIABLE = "ORCH_TRAINER"
"""Holds job.yaml's `trainer:` as JSON; the runtime sets it for every rank."""

_SWITCHES = {"1": "true", "0": "false"}


@cache
def settings() -> Mapping[str, Key]:
    """Return every setting, by its name."""
    return keys_of(TrainingSettings)


def read_everything(arguments: Sequence[str] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return command line over job.yaml over `defaults`, as constructor arguments. Exits with 2 on a bad command line."""
    from_job = job_settings(os.environ)
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    add_arguments(parser)
    given = vars(parser.parse_args(arguments))
    return read_mapping({**defaults, **from_job, **given})


def job_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return job.yaml's `trainer:`; empty outside of orch."""
    text = environ.get(TRAINER_VARIABLE, "")
    if not text:
        return {}
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise fail_once(ConfigError(f"{TRAINER_VARIABLE} is not JSON ({error}): unset it, or correct it")) from error
    if not isinstance(found, dict):
        raise fail_once(ConfigError(f"{TRAINER_VARIABLE} is not a JSON object: unset it, or correct it"))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--batch-size` and the like, one for each setting, with unit and default in the help."""
    group = parser.add_argument_group("training system")
    for name, key in settings().items():
        shown = "" if key.default is None else f" [{show_default(key)}]"
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if isinstance(key.kind, Boolean) else {}
        group.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            metavar=key.doc.unit.upper().replace(" ", "_"),
            help=f"{key.doc.text}{shown}".replace("%", "%%"),
            **switch,
        )


def show_default(key: Key) -> str:
    """Return a setting's default as YAML would write it."""
    value = key.write(key.default)
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_mapping(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` as constructor arguments. Raises ConfigError with every unknown name and every invalid value."""
    values, problems = sort_out(given, typed=True)
    if problems:
        raise fail_once(ConfigError(*map(sentence, problems.items())))
    return values


def sort_out(given: Mapping[str, Any], *, typed: bool) -> tuple[dict[str, Any], dict[str, BadValueError]]:
    """Return the readable values of `given`, and the errors of the others, by name.

    ``typed``: text is read as on a command line, where `8` is a number.
    """
    values, problems = {}, {}
    for name, value in given.items():
        try:
            values[name] = _value(name, value, typed=typed)
        except BadValueError as error:
            problems[str(name)] = error
    return values, problems


def sentence(problem: tuple[str, BadValueError]) -> str:
    """Return a sentence about an invalid setting, and what to do."""
    name, error = problem
    return f"{name}: {error}"


def _value(name: str, value: Any, *, typed: bool) -> Any:
    key = settings().get(name)
    if key is None:
        raise unknown_key(("trainer",), str(name), list(settings()), ())
    if isinstance(key.kind, Duration) and isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value}s"  # a Python number is seconds, as in the standard library; text needs a unit
    node = python_node(value)
    if typed and isinstance(value, str):
        node = typed_node(_SWITCHES.get(value, value) if isinstance(key.kind, Boolean) else value)
    return key.read(node)
