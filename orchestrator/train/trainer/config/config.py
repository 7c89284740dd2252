"""Every setting of a training run: one frozen record, checked as a whole, from Python, YAML or the command line.

Owns the check as a whole, the aliases and the presets. ``spec.trainer`` defines the settings, rules.py the rules
between them, and sources.py reads them from text. Imports no torch: a configuration can be checked anywhere. A setting
without effect is refused.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from orchestrator.spec.trainer import TrainingMode, TrainingSettings
from orchestrator.train.errors import ConfigError, fail_once
from orchestrator.train.trainer.config import rules
from orchestrator.train.trainer.config.sources import (
    job_settings,
    read_everything,
    read_mapping,
    sentence,
    settings,
    sort_out,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
