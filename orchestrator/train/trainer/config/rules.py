"""What makes a training configuration wrong: values out of range, aliases that disagree, fields that contradict.

Pure functions that list every problem, each with its remedy. `conflicts` knows the fields alone; `conflicts_with_place`
also what the process found around it: device, number of ranks, what the hardware computes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from orchestrator.train.trainer.config.settings import TrainingSettings

MODES = ("data_parallel", "distributed_data_parallel", "fully_sharded")
PRECISIONS = ("auto", "fp32", "bf16", "fp16", "fp8")
BACKENDS = ("nccl", "gloo", "mpi", "cpu:gloo,cuda:nccl")
_MIB = 1024 * 1024
_WORD = re.compile(r"[a-z0-9_]+")

_POSITIVE_INTEGERS = ("batch_size", "gradient_accumulation_steps")
_OPTIONAL_POSITIVE_INTEGERS = (
    *("global_batch_size", "world_size", "prefetch_factor", "reduce_bucket_size", "checkpoint_frequency"),
)
_NATURAL_NUMBERS = ("num_workers", "max_nonfinite_steps", "seed")
_OPTIONAL_NATURAL_NUMBERS = ("rank", "local_rank")
_OPTIONAL_POSITIVE = ("max_grad_norm", "bucket_cap_mb", "flops_per_sample", "peak_flops")
DURATIONS = ("timeout", "recovery_timeout", "log_interval")
_SWITCHES = (
    *("use_gradient_checkpointing", "compile", "find_unused_parameters", "broadcast_buffers", "sync_bn"),
    *("use_gradient_as_bucket_view", "static_graph", "shuffle", "enable_fault_tolerance", "oom_retry"),
)
_OPTIONAL_SWITCHES = (
    *("use_mixed_precision", "fp16_compression", "use_fp16_allreduce", "pin_memory"),
    *("persistent_workers", "progress_bar"),
)
_OPTIONAL_TEXTS = ("backend", "compile_mode", "compile_backend")


def _is_int(value: Any, *, at_least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_natural(value: Any) -> bool:
    return _is_int(value, at_least=0)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def as_duration(value: Any) -> Any:
    """A number as that many seconds; anything else as it is."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < timedelta.max.total_seconds():
        return timedelta(seconds=value)
    return value


def _is_duration(value: Any) -> bool:
    return isinstance(value, timedelta) and value > timedelta()


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


_RANGES: tuple[tuple[tuple[str, ...], bool, Callable[[Any], bool], str], ...] = (
    (_POSITIVE_INTEGERS, False, _is_int, "write a whole number of at least 1"),
    (_OPTIONAL_POSITIVE_INTEGERS, True, _is_int, "write a whole number of at least 1"),
    (_NATURAL_NUMBERS, False, _is_natural, "write a whole number of at least 0"),
    (_OPTIONAL_NATURAL_NUMBERS, True, _is_natural, "write a whole number of at least 0"),
    (_OPTIONAL_POSITIVE, True, _is_positive, "write a number above 0"),
    (DURATIONS, False, _is_duration, "write seconds above 0, timedelta(minutes=5) or, in YAML, 5m"),
    (_SWITCHES, False, _is_switch, "write true or false"),
    (_OPTIONAL_SWITCHES, True, _is_switch, "write true or false"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a configuration meets when it is used: the facts that rules look at."""

    world_size: int
    local_rank: int
    cuda_devices: int
    on_cuda: bool
    computes_bf16: bool
    computes_fp8: bool
    most_ranks: int | None = None
    """Of an elastic job, whose number of ranks may change; None when it is fixed."""


def wrong_values(config: TrainingSettings) -> Iterator[tuple[str, str]]:
    """Every field that holds the wrong type or is out of range, with what is wrong."""
    yield from _choices(config)
    for names, optional, fits, advice in _RANGES:
        for name in names:
            value = getattr(config, name)
            if not (fits(value) or (value is None and optional)):
                yield name, f"{name} is {value!r}: {advice}{', or leave it out' if optional else ''}"


def _choices(config: TrainingSettings) -> Iterator[tuple[str, str]]:
    if config.training_mode not in MODES:
        yield "training_mode", f"training_mode is {config.training_mode!r}: write one of {', '.join(MODES)}"
    if config.precision is not None and config.precision not in PRECISIONS:
        yield "precision", f"precision is {config.precision!r}: write one of {', '.join(PRECISIONS)}"
    if config.backend is not None and config.backend not in BACKENDS:
        yield "backend", f"backend is {config.backend!r}: write one of {', '.join(BACKENDS)}, or leave it out"
    for name in _OPTIONAL_TEXTS[1:]:
        value = getattr(config, name)
        if value is not None and not (isinstance(value, str) and value):
            yield name, f"{name} is {value!r}: write a name that torch.compile knows, or leave it out"
    ids = config.device_ids
    if ids is not None:
        numbers = list(ids) if isinstance(ids, list | tuple) else []
        if (
            not numbers
            or not all(_is_int(number, at_least=0) for number in numbers)
            or len(set(numbers)) < len(numbers)
        ):
            advice = "write the indices of different GPUs, such as [0, 1], or leave it out"
            yield "device_ids", f"device_ids is {ids!r}: {advice}"


def disagreeing_aliases(config: TrainingSettings) -> Iterator[str]:
    """Every pair of names for one thing that say different things."""
    first, second = config.fp16_compression, config.use_fp16_allreduce
    if first is not None and second is not None and first is not second:
        yield f"fp16_compression is {first} and use_fp16_allreduce is {second}, but they are one setting: keep one"
    megabytes, size = config.bucket_cap_mb, config.reduce_bucket_size
    both = _is_int(size, at_least=1) and isinstance(megabytes, int | float)
    if both and size != round((megabytes or 0) * _MIB):
        yield (
            f"bucket_cap_mb is {megabytes} (MiB) and reduce_bucket_size is {size} (bytes, {(size or 0) / _MIB:g} MiB), "
            "but they are one setting: keep one"
        )


def not_about(names: Collection[str], problems: Iterable[str]) -> Iterator[str]:
    """The problems that mention none of these fields: what follows from a wrong value is no news."""
    return (problem for problem in problems if not set(_WORD.findall(problem)) & set(names))


def conflicts(config: TrainingSettings) -> Iterator[str]:
    """Every contradiction between fields, whatever the hardware."""
    yield from _mode_conflicts(config)
    yield from _precision_conflicts(config)
    yield from _batch_conflicts(config)
    yield from _loader_conflicts(config)
    if config.static_graph and config.find_unused_parameters:
        yield (
            "static_graph says that every step uses the same parameters, find_unused_parameters that it does not: "
            "turn one off (static_graph alone copes with parameters that are never used)"
        )
    if config.rank is not None and config.rank >= (config.world_size or config.rank + 1):
        yield f"rank is {config.rank} of world_size {config.world_size}: ranks count from 0 to world_size - 1"
    if config.rank is not None and config.world_size is None:
        yield f"rank is {config.rank}, but world_size is not set: set both, or neither (RANK and WORLD_SIZE are read)"
    for name in ("compile_mode", "compile_backend"):
        if getattr(config, name) is not None and not config.compile:
            yield f"{name} has no effect without compile: set compile to true, or leave {name} out"
    if not config.enable_fault_tolerance:
        for name, default in (("checkpoint_frequency", None), ("recovery_timeout", timedelta(minutes=5))):
            if getattr(config, name) != default:
                yield f"{name} has no effect while enable_fault_tolerance is false: turn that on, or leave {name} out"
    if config.oom_retry and (config.training_mode == "fully_sharded" or config.static_graph):
        which = "static_graph" if config.static_graph else "fully_sharded"
        yield f"oom_retry runs a step again in halves, which {which} cannot: turn one off"


_NOT_OF_DATA_PARALLEL = {
    "find_unused_parameters": False,
    "broadcast_buffers": True,
    "sync_bn": False,
    "fp16_compression": False,
    "use_gradient_as_bucket_view": True,
    "bucket_cap_mb": 25.0,
    "static_graph": False,
    "global_batch_size": None,
}
_NOT_OF_FULLY_SHARDED = {
    name: _NOT_OF_DATA_PARALLEL[name]
    for name in (
        *("find_unused_parameters", "broadcast_buffers", "fp16_compression"),
        *("use_gradient_as_bucket_view", "bucket_cap_mb", "static_graph"),
    )
}


def _mode_conflicts(config: TrainingSettings) -> Iterator[str]:
    if config.training_mode == "data_parallel":
        if (config.world_size or 1) > 1:
            yield (
                f"data_parallel is one process for all GPUs, but world_size is {config.world_size}: "
                "set training_mode to distributed_data_parallel"
            )
        unused = _NOT_OF_DATA_PARALLEL
    elif config.training_mode == "fully_sharded":
        unused = _NOT_OF_FULLY_SHARDED
    else:
        return
    for name, default in unused.items():
        if getattr(config, name) != default:
            yield (
                f"{name} has no effect with training_mode {config.training_mode}: leave it out, or set training_mode "
                "to distributed_data_parallel"
            )


def _precision_conflicts(config: TrainingSettings) -> Iterator[str]:
    if config.use_mixed_precision and config.precision == "fp32":
        yield "use_mixed_precision is true, but precision is fp32: leave one out, or set precision to auto"
    if config.use_mixed_precision is False and config.precision != "fp32":
        yield f"use_mixed_precision is false, but precision is {config.precision}: leave one out, or write fp32"
    if config.precision == "fp16" and config.training_mode == "fully_sharded":
        yield "fp16 gradient scaling is not supported with fully_sharded: set precision to bf16"
    if config.precision == "fp8" and config.training_mode != "distributed_data_parallel":
        yield f"fp8 is not supported with training_mode {config.training_mode}: use distributed_data_parallel, or bf16"


def _batch_conflicts(config: TrainingSettings) -> Iterator[str]:
    whole, size = config.global_batch_size, config.batch_size
    if whole is None:
        return
    if config.gradient_accumulation_steps != 1:
        yield (
            "global_batch_size decides how many batches are accumulated: leave gradient_accumulation_steps out, "
            "or global_batch_size"
        )
    yield from batch_misfit(whole, size, config.world_size or 1)


def batch_misfit(global_batch_size: int, batch_size: int, world_size: int) -> Iterator[str]:
    """Whether the samples of one optimizer step cannot be dealt out in whole batches."""
    per_pass = batch_size * world_size
    if global_batch_size % per_pass:
        yield (
            f"global_batch_size {global_batch_size} is no multiple of batch_size {batch_size} x {world_size} ranks = "
            f"{per_pass}: choose a batch_size that divides {global_batch_size} / {world_size}"
        )


def _loader_conflicts(config: TrainingSettings) -> Iterator[str]:
    if config.num_workers:
        return
    if config.prefetch_factor is not None:
        yield "prefetch_factor needs loader workers: set num_workers to 1 or more, or leave prefetch_factor out"
    if config.persistent_workers:
        yield "persistent_workers needs loader workers: set num_workers to 1 or more, or leave persistent_workers out"


def conflicts_with_place(config: TrainingSettings, around: Surroundings) -> Iterator[str]:
    """Every contradiction between the configuration and the process that it is used in."""
    if around.most_ranks is not None:
        yield from _elastic_conflicts(config, around.most_ranks)
    elif config.world_size is None and config.global_batch_size is not None:
        yield from batch_misfit(config.global_batch_size, config.batch_size, around.world_size)
    if config.training_mode == "data_parallel" and around.world_size > 1:
        yield (
            f"data_parallel is one process for all GPUs, but there are {around.world_size} ranks: "
            "start one, or set training_mode to distributed_data_parallel"
        )
    if config.backend == "nccl" and not around.on_cuda:
        yield "backend nccl needs a GPU in every rank, and this one has none: leave backend out, or write gloo"
    if config.training_mode == "fully_sharded" and around.world_size == 1:
        yield "fully_sharded has nothing to share with one rank: start more, or leave training_mode out"
    yield from _device_conflicts(config, around)
    if config.precision == "bf16" and not around.computes_bf16:
        yield "this GPU does not compute bf16: set precision to auto (which takes fp16 here)"
    if config.precision == "fp8" and not around.computes_fp8:
        yield "fp8 needs a GPU of compute capability 8.9 or newer: set precision to auto"


def _elastic_conflicts(config: TrainingSettings, most_ranks: int) -> Iterator[str]:
    if config.training_mode == "data_parallel":
        yield (
            "data_parallel is one process, and an elastic job has a changing number of them: leave training_mode out, or "
            "write a fixed num_workers"
        )
    if not config.enable_fault_tolerance:
        yield (
            "enable_fault_tolerance is false, but an elastic job needs checkpoints to go on from on another number of ranks: "
            "leave it out, or write a fixed num_workers"
        )
    whole = config.global_batch_size
    if whole is not None and whole < most_ranks:
        yield (
            f"global_batch_size {whole} has not one sample for each of {most_ranks} ranks: raise it, or lower "
            "resources.num_workers.max"
        )


def _device_conflicts(config: TrainingSettings, around: Surroundings) -> Iterator[str]:
    ids = config.device_ids
    if ids is None:
        return
    if not around.on_cuda:
        yield f"device_ids names GPUs {list(ids)}, and this process sees none: leave it out"
        return
    missing = [number for number in ids if number >= around.cuda_devices]
    if missing:
        yield f"device_ids names GPUs {missing}, but there are only {around.cuda_devices}: they count from 0"
    if config.training_mode != "data_parallel" and around.local_rank >= len(ids):
        yield (
            f"device_ids has {len(ids)} GPUs, but local rank {around.local_rank} needs one of its own: "
            "name one for each rank of the node"
        )
