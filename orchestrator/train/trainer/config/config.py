"""Every setting of a training run: one frozen record, checked as a whole, the same from Python, YAML and the command line.

Owns the fields, their units and defaults, the aliases, and the presets. The rules between fields are in
config_rules.py, reading them from text is in config_sources.py. Imports no torch: a configuration can be checked
anywhere. A field that could be ignored is refused instead: whatever is set has its effect.
"""
# ruff: noqa: RUF009  (the calls in the defaults make dataclasses.field objects)

from __future__ import annotations

import dataclasses
import enum
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self

from orchestrator.train.errors import ConfigError, fail_once
from orchestrator.train.trainer.config import rules as config_rules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class TrainingMode(enum.StrEnum):
    """How the ranks share the work."""

    DATA_PARALLEL = "data_parallel"
    """One process, one thread for each GPU (torch.nn.DataParallel): for trying things out on one machine."""
    DISTRIBUTED_DATA_PARALLEL = "distributed_data_parallel"
    """One process for each GPU, each with the whole model (DistributedDataParallel)."""
    FULLY_SHARDED = "fully_sharded"
    """One process for each GPU, each with a part of the model (FSDP2): for models that do not fit one GPU."""


Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]

_ALIASES = {"use_fp16_allreduce": "fp16_compression", "reduce_bucket_size": "bucket_cap_mb"}
_MIB = 1024 * 1024


def _setting(default: Any, unit: str, help_text: str) -> Any:
    return field(default=default, metadata={"unit": unit, "help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiGPUConfig:
    """The settings of a training run. Raises ConfigError with everything that is wrong, each with its remedy.

    A duration is a timedelta or a number of seconds. A default of None is filled in: from the launcher's environment
    (world_size, rank, local_rank), from the device (backend, pin_memory, precision auto), or from another field.
    docs/training.md lists unit, default and effect.
    """

    training_mode: TrainingMode = _setting(
        TrainingMode.DISTRIBUTED_DATA_PARALLEL, "name", "how ranks share the work: one process per GPU unless said else"
    )
    device_ids: tuple[int, ...] | None = _setting(
        None, "CUDA indices", "data_parallel: the GPUs to use; else: the GPU of each local rank, in their order"
    )
    batch_size: int = _setting(32, "samples", "samples per rank and forward pass")
    global_batch_size: int | None = _setting(
        None, "samples", "samples per optimizer step over all ranks; sets gradient_accumulation_steps to fit"
    )
    world_size: int | None = _setting(None, "ranks", "number of ranks; WORLD_SIZE, else 1")
    rank: int | None = _setting(None, "rank", "this process among all ranks; RANK, else 0")
    local_rank: int | None = _setting(None, "rank", "this process among its node's ranks; LOCAL_RANK, else 0")
    backend: str | None = _setting(None, "name", "of torch.distributed: nccl on GPUs, else gloo")
    timeout: timedelta = _setting(timedelta(minutes=30), "duration", "a collective that takes longer is an error")

    use_mixed_precision: bool | None = _setting(
        None, "yes/no", "compute in a lower precision where that is safe (autocast); weights stay fp32"
    )
    precision: Precision | None = _setting(
        None, "name", "auto: bf16 where the device computes it, else fp16 with gradient scaling; fp8 needs to be named"
    )
    gradient_accumulation_steps: int = _setting(1, "batches", "forward passes per optimizer step")
    max_grad_norm: float | None = _setting(None, "norm", "clip the gradient's 2-norm, over all parameters, to this")
    use_gradient_checkpointing: bool = _setting(
        False, "yes/no", "compute activations again in the backward pass instead of keeping them"
    )
    compile: bool = _setting(False, "yes/no", "torch.compile the model")
    compile_mode: str | None = _setting(None, "name", "of torch.compile: reduce-overhead, max-autotune, ...")
    compile_backend: str | None = _setting(None, "name", "of torch.compile; inductor")

    find_unused_parameters: bool = _setting(False, "yes/no", "the model does not use all its parameters in each step")
    broadcast_buffers: bool = _setting(
        True, "yes/no", "rank 0's buffers (running statistics) go to all ranks each step"
    )
    sync_bn: bool = _setting(False, "yes/no", "batch normalization over the batches of all ranks")
    fp16_compression: bool | None = _setting(None, "yes/no", "send gradients as fp16: half the bytes; default no")
    use_fp16_allreduce: bool | None = _setting(None, "yes/no", "the same as fp16_compression")
    use_gradient_as_bucket_view: bool = _setting(
        True, "yes/no", "gradients live in the buffers that are sent: one copy and its memory less"
    )
    bucket_cap_mb: float | None = _setting(None, "MiB", "gradients are sent in pieces of about this size; default 25")
    reduce_bucket_size: int | None = _setting(None, "bytes", "the same as bucket_cap_mb")
    static_graph: bool = _setting(False, "yes/no", "every step uses the same parameters in the same order")

    pin_memory: bool | None = _setting(None, "yes/no", "batches in page-locked memory, copied to the GPU meanwhile")
    num_workers: int = _setting(0, "processes", "processes per rank that load data; 0: the training process does")
    prefetch_factor: int | None = _setting(None, "batches", "batches that each worker loads ahead; default 2")
    persistent_workers: bool | None = _setting(None, "yes/no", "keep the workers between epochs; default yes")
    shuffle: bool = _setting(True, "yes/no", "another order of the training data in each epoch, from the seed")
    seed: int = _setting(0, "number", "of the order of the data and of each rank's random numbers")

    enable_fault_tolerance: bool = _setting(True, "yes/no", "save checkpoints, resume from them, leave on SIGTERM")
    checkpoint_frequency: int | None = _setting(
        None, "steps", "optimizer steps between checkpoints; default: checkpoint.interval of job.yaml, else 1000"
    )
    recovery_timeout: timedelta = _setting(
        timedelta(minutes=5), "duration", "how long a (re)started rank waits for the others to be back"
    )
    max_nonfinite_steps: int = _setting(
        3, "steps", "updates skipped in a row because the loss is NaN or infinite before training stops; 0: none"
    )
    oom_retry: bool = _setting(
        False, "yes/no", "out of memory: halve the batch, double the accumulation, and try the step again"
    )

    log_interval: timedelta = _setting(timedelta(seconds=10), "duration", "between lines in the log")
    progress_bar: bool | None = _setting(None, "yes/no", "on rank 0; default: when there is a terminal")
    flops_per_sample: float | None = _setting(
        None, "FLOP", "of one sample, forward and backward, for MFU; measured once where it is not given"
    )
    peak_flops: float | None = _setting(
        None, "FLOP/s", "one GPU's peak in the precision used, for MFU; from a table of known GPUs"
    )

    heard_job: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether job.yaml's `trainer:` is in here already: no setting; the manager adds it where it is not."""

    def __post_init__(self) -> None:
        for name in config_rules.DURATIONS:  # in Python, a number is seconds
            object.__setattr__(self, name, config_rules.as_duration(getattr(self, name)))
        wrong = dict(config_rules.wrong_values(self))
        problems = [*wrong.values(), *config_rules.disagreeing_aliases(self)]
        asked_rank = self.rank
        # What is wrong by itself is put aside, so that all the rest is checked, too.
        for each in dataclasses.fields(self):
            if each.name in wrong:
                object.__setattr__(self, each.name, each.default)
        self._fill_in()
        problems += config_rules.not_about(wrong, config_rules.conflicts(self))
        if problems:
            raise fail_once(ConfigError(*problems), rank=asked_rank if isinstance(asked_rank, int) else None)

    def _fill_in(self) -> None:
        compressed = bool(self.fp16_compression or self.use_fp16_allreduce)
        megabytes = self.bucket_cap_mb
        if megabytes is None:
            megabytes = 25.0 if self.reduce_bucket_size is None else self.reduce_bucket_size / _MIB
        lower = self.precision not in (None, "fp32") or bool(self.use_mixed_precision)
        filled = {
            "training_mode": TrainingMode(self.training_mode),
            "device_ids": None if self.device_ids is None else tuple(self.device_ids),
            "fp16_compression": compressed,
            "use_fp16_allreduce": compressed,
            "bucket_cap_mb": megabytes,
            "reduce_bucket_size": round(megabytes * _MIB),
            "use_mixed_precision": lower if self.use_mixed_precision is None else self.use_mixed_precision,
            "precision": self.precision or ("auto" if lower else "fp32"),
        }
        for name, value in filled.items():  # frozen from here on
            object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; what was filled in is filled in anew."""
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
        """The configuration with job.yaml's `trainer:` over it; itself outside of orch, or when it is in there already.

        Raises ConfigError for what the two contradict each other in.
        """
        from orchestrator.train.trainer.config.sources import job_settings, read_mapping

        settings = {} if self.heard_job else job_settings(os.environ)
        if not settings:
            return self
        changed = self.replace(**read_mapping(type(self), settings))
        object.__setattr__(changed, "heard_job", True)
        return changed

    @classmethod
    def from_job(cls, **defaults: Any) -> Self:
        """Read job.yaml's `trainer:`, over `defaults`. Raises ConfigError for all that is wrong at once."""
        return cls(**defaults).with_job()

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Read `trainer:` of job.yaml, or any mapping of names to values. Raises ConfigError for all of it at once."""
        from orchestrator.train.trainer.config.sources import read_mapping

        return cls(**read_mapping(cls, settings))

    @classmethod
    def from_args(cls, arguments: Sequence[str] | None = None, **defaults: Any) -> Self:
        """Read `--batch-size 64 --use-mixed-precision ...` from the command line, over job.yaml's `trainer:`, over `defaults`."""
        from orchestrator.train.trainer.config.sources import read_everything

        config = cls(**read_everything(cls, arguments, defaults))
        object.__setattr__(config, "heard_job", True)
        return config

    @classmethod
    def development(cls, **changes: Any) -> Self:
        """For trying things out on one machine: all its GPUs in one process, mixed precision, two loader workers."""
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
        """For long runs: one process per GPU, mixed precision, accumulation, clipping, checkpoints."""
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
        """For models that fill the GPU: as production, with more accumulation and activations computed again."""
        return cls.production(
            **{
                "gradient_accumulation_steps": 1 if "global_batch_size" in changes else 8,
                "use_gradient_checkpointing": True,
                "sync_bn": True,
                **changes,
            }
        )
