"""Contradictions between settings of a training run, or with the place where it runs.

Pure functions that list every finding: the settings concerned, the error, the remedy. `conflicts` uses the settings
alone; `conflicts_with_place` also the facts of the process: device, number of ranks, abilities of the hardware.
``spec.trainer`` checks each setting by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from orchestrator.spec.problems import Finding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from orchestrator.spec.trainer import TrainingSettings

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Facts about the process that rules use."""

    world_size: int
    local_rank: int
    cuda_devices: int
    on_cuda: bool
    computes_bf16: bool
    most_ranks: int | None = None
    """Largest number of ranks of an elastic job; None when the number is fixed."""


def about(*names: str, message: str, hint: str) -> Finding:
    """Return a finding about settings; the first name is the setting to change."""
    return Finding(path=names[:1], message=message, hint=hint, others=tuple((name,) for name in names[1:]))


def names_of(finding: Finding) -> tuple[str, ...]:
    """Return the settings of a finding."""
    return tuple(str(path[-1]) for path in (finding.path, *finding.others))


def sentence(finding: Finding) -> str:
    """Return what is wrong, and what to do."""
    return f"{finding.message}: {finding.hint}"


def not_about(names: Collection[str], findings: Iterable[Finding]) -> Iterator[Finding]:
    """Return the findings about none of these settings: consequences of an invalid value are not reported."""
    return (finding for finding in findings if not set(names_of(finding)) & set(names))


def disagreeing_aliases(config: TrainingSettings) -> Iterator[Finding]:
    """Return every pair of aliases with different values."""
    first, second = config.fp16_compression, config.use_fp16_allreduce
    if first is not None and second is not None and first is not second:
        message = f"fp16_compression is {first} and use_fp16_allreduce is {second}, but they are one setting"
        yield about("fp16_compression", "use_fp16_allreduce", message=message, hint="keep one")
    megabytes, size = config.bucket_cap_mb, config.reduce_bucket_size
    if megabytes is not None and size is not None and size != round(megabytes * _MIB):
        message = (
            f"bucket_cap_mb is {megabytes:g} (MiB) and reduce_bucket_size is {size} (bytes, {size / _MIB:g} MiB), "
            "but they are one setting"
        )
        yield about("bucket_cap_mb", "reduce_bucket_size", message=message, hint="keep one")


def conflicts(config: TrainingSettings) -> Iterator[Finding]:
    """Return every contradiction between settings, whatever the hardware. Derived values are already filled in."""
    yield from _mode_conflicts(config)
    yield from _precision_conflicts(config)
    yield from _batch_conflicts(config)
    yield from _balance_conflicts(config)
    yield from _loader_conflicts(config)
    yield from _rank_conflicts(config)
    yield from _fault_tolerance_conflicts(config)
    if config.static_graph and config.find_unused_parameters:
        yield about(
            *("static_graph", "find_unused_parameters"),
            message="static_graph says that every step uses the same parameters, find_unused_parameters that it does not",
            hint="turn one off (static_graph alone copes with parameters that are never used)",
        )
    for name in ("compile_mode", "compile_backend"):
        if getattr(config, name) is not None and not config.compile:
            message = f"{name} has no effect without compile"
            yield about(name, "compile", message=message, hint=f"set compile to true, or leave {name} out")


def _rank_conflicts(config: TrainingSettings) -> Iterator[Finding]:
    rank, size = config.rank, config.world_size
    if rank is not None and size is not None and rank >= size:
        message = f"rank is {rank} of world_size {size}"
        yield about("rank", "world_size", message=message, hint="ranks count from 0 to world_size - 1")
    if rank is not None and size is None:
        message = f"rank is {rank}, but world_size is not set"
        yield about("rank", "world_size", message=message, hint="set both, or neither (RANK and WORLD_SIZE are read)")


def _fault_tolerance_conflicts(config: TrainingSettings) -> Iterator[Finding]:
    if not config.enable_fault_tolerance:
        for name, default in (("checkpoint_frequency", None), ("recovery_timeout", timedelta(minutes=5))):
            if getattr(config, name) != default:
                message = f"{name} has no effect while enable_fault_tolerance is false"
                yield about(name, "enable_fault_tolerance", message=message, hint=f"turn that on, or leave {name} out")
    if config.oom_retry and (config.training_mode == "fully_sharded" or config.static_graph):
        which, other = ("static_graph",) * 2 if config.static_graph else ("fully_sharded", "training_mode")
        message = f"oom_retry runs a step again in halves, which {which} cannot"
        yield about("oom_retry", other, message=message, hint="turn one off")


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
_OTHER_NAMES = {"fp16_compression": "use_fp16_allreduce", "bucket_cap_mb": "reduce_bucket_size"}


def _mode_conflicts(config: TrainingSettings) -> Iterator[Finding]:
    if config.training_mode == "data_parallel":
        if (config.world_size or 1) > 1:
            yield about(
                *("training_mode", "world_size"),
                message=f"data_parallel is one process for all GPUs, but world_size is {config.world_size}",
                hint="set training_mode to distributed_data_parallel",
            )
        unused = _NOT_OF_DATA_PARALLEL
    elif config.training_mode == "fully_sharded":
        unused = _NOT_OF_FULLY_SHARDED
    else:
        return
    for name, default in unused.items():
        if getattr(config, name) != default:
            others = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else []
            yield about(
                *(name, *others, "training_mode"),
                message=f"{name} has no effect with training_mode {config.training_mode}",
                hint="leave it out, or set training_mode to distributed_data_parallel",
            )


def _precision_conflicts(config: TrainingSettings) -> Iterator[Finding]:
    mixed, precision, mode = config.use_mixed_precision, config.precision, config.training_mode
    if mixed and precision == "fp32":
        message = "use_mixed_precision is true, but precision is fp32"
        yield about("use_mixed_precision", "precision", message=message, hint="leave one out, or set precision to auto")
    if mixed is False and precision != "fp32":
        message = f"use_mixed_precision is false, but precision is {precision}"
        yield about("use_mixed_precision", "precision", message=message, hint="leave one out, or write fp32")
    if precision == "fp16" and mode == "fully_sharded":
        message = "fp16 gradient scaling is not supported with fully_sharded"
        yield about("precision", "training_mode", message=message, hint="set precision to bf16")


def _batch_conflicts(config: TrainingSettings) -> Iterator[Finding]:
    whole, size = config.global_batch_size, config.batch_size
    if whole is None:
        return
    if config.gradient_accumulation_steps != 1:
        yield about(
            *("global_batch_size", "gradient_accumulation_steps"),
            message="global_batch_size decides how many batches are accumulated",
            hint="leave gradient_accumulation_steps out, or global_batch_size",
        )
    if config.balance == "equal":
        yield from _batch_misfit(whole, size, config.world_size or 1)


def _balance_conflicts(config: TrainingSettings) -> Iterator[Finding]:
    """Return every contradiction between `balance: measured` and other settings."""
    if config.balance == "equal":
        return
    for name, off in (("sync_bn", False), ("static_graph", False)):
        if getattr(config, name) != off:
            message = (
                f"balance: measured gives ranks different numbers of passes, and {name} needs all of them in every pass"
            )
            yield about("balance", name, message=message, hint="leave one out")
    if config.training_mode != "distributed_data_parallel":
        message = f"balance has no effect with training_mode {config.training_mode}"
        yield about(
            "balance",
            "training_mode",
            message=message,
            hint="leave it out, or set training_mode to distributed_data_parallel",
        )
    if not config.enable_fault_tolerance:
        message = "balance: measured changes shares at checkpoints, and enable_fault_tolerance is false"
        yield about("balance", "enable_fault_tolerance", message=message, hint="turn that on, or leave balance out")


def _batch_misfit(global_batch_size: int, batch_size: int, world_size: int) -> Iterator[Finding]:
    """Return why the samples of one optimizer step cannot be divided into whole batches."""
    per_pass = batch_size * world_size
    if global_batch_size % per_pass:
        yield about(
            *("global_batch_size", "batch_size", "world_size"),
            message=f"global_batch_size {global_batch_size} is not a multiple of batch_size {batch_size} x {world_size} ranks = "
            f"{per_pass}",
            hint=f"choose a batch_size that divides {global_batch_size} / {world_size}",
        )


def _loader_conflicts(config: TrainingSettings) -> Iterator[Finding]:
    if config.num_workers:
        return
    for name, given in (
        ("prefetch_factor", config.prefetch_factor is not None),
        ("persistent_workers", config.persistent_workers),
    ):
        if given:
            hint = f"set num_workers to 1 or more, or leave {name} out"
            yield about(name, "num_workers", message=f"{name} needs loader workers", hint=hint)


def conflicts_with_place(config: TrainingSettings, around: Surroundings) -> Iterator[Finding]:
    """Return every contradiction between the configuration and its process."""
    if around.most_ranks is not None:
        yield from _elastic_conflicts(config, around.most_ranks)
    elif config.balance == "measured":
        yield from _unequal_conflicts(config, around.world_size)
    elif config.world_size is None and config.global_batch_size is not None:
        yield from _batch_misfit(config.global_batch_size, config.batch_size, around.world_size)
    if config.training_mode == "data_parallel" and around.world_size > 1:
        yield about(
            "training_mode",
            message=f"data_parallel is one process for all GPUs, but there are {around.world_size} ranks",
            hint="start one, or set training_mode to distributed_data_parallel",
        )
    if config.backend == "nccl" and not around.on_cuda:
        message = "backend nccl needs a GPU in every rank, and this one has none"
        yield about("backend", message=message, hint="leave backend out, or write gloo")
    if config.training_mode == "fully_sharded" and around.world_size == 1:
        message = "fully_sharded has nothing to share with one rank"
        yield about("training_mode", message=message, hint="start more, or leave training_mode out")
    yield from _device_conflicts(config, around)
    if config.precision == "bf16" and not around.computes_bf16:
        message = "this GPU does not compute bf16"
        yield about("precision", message=message, hint="set precision to auto (which takes fp16 here)")


_OF_THE_LOADER = {
    "batch_size": 32,
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": None,
    "pin_memory": None,
    "shuffle": True,
}


def without_effect(config: TrainingSettings, *, on_cuda: bool, world_size: int, own_loader: bool) -> Iterator[Finding]:
    """Return the valid settings without effect in this process, to be shown at the start; elsewhere they have one."""
    if own_loader:
        for name, default in _OF_THE_LOADER.items():
            if getattr(config, name) != default:
                message = f"{name} has no effect with a loader of your own"
                yield about(name, message=message, hint="set it where the loader is made, or pass the dataset")
    elif config.pin_memory and not on_cuda:
        yield about("pin_memory", message="pin_memory has no effect without a GPU", hint="leave it out")
    if config.sync_bn and world_size == 1:
        yield about("sync_bn", message="sync_bn has no effect with one rank", hint="leave it out, or start more ranks")
    elif config.sync_bn and not on_cuda:
        message = "sync_bn has no effect without a GPU: torch's SyncBatchNorm needs one"
        yield about("sync_bn", message=message, hint="leave it out, or train on GPUs")


def _unequal_conflicts(config: TrainingSettings, world_size: int) -> Iterator[Finding]:
    if world_size == 1:
        message = "balance has nothing to share with one rank"
        yield about("balance", message=message, hint="start more, or leave balance out")
    whole = config.global_batch_size
    if whole is not None and whole < world_size:
        message = f"global_batch_size {whole} is less than one sample for each of {world_size} ranks"
        yield about("global_batch_size", message=message, hint="raise it, or start fewer ranks")


def _elastic_conflicts(config: TrainingSettings, most_ranks: int) -> Iterator[Finding]:
    if config.training_mode == "data_parallel":
        yield about(
            "training_mode",
            message="data_parallel is one process, and an elastic job has a changing number of them",
            hint="leave training_mode out, or write a fixed num_workers",
        )
    if not config.enable_fault_tolerance:
        yield about(
            "enable_fault_tolerance",
            message="enable_fault_tolerance is false, but an elastic job needs checkpoints to go on from on another number "
            "of ranks",
            hint="leave it out, or write a fixed num_workers",
        )
    whole = config.global_batch_size
    if whole is not None and whole < most_ranks:
        yield about(
            "global_batch_size",
            message=f"global_batch_size {whole} is less than one sample for each of {most_ranks} ranks",
            hint="raise it, or lower resources.num_workers.max",
        )


def _device_conflicts(config: TrainingSettings, around: Surroundings) -> Iterator[Finding]:
    ids = config.device_ids
    if ids is None:
        return
    if not around.on_cuda:
        message = f"device_ids names GPUs {list(ids)}, and this process sees none"
        yield about("device_ids", message=message, hint="leave it out")
        return
    missing = [number for number in ids if number >= around.cuda_devices]
    if missing:
        message = f"device_ids names GPUs {missing}, but there are only {around.cuda_devices}"
        yield about("device_ids", message=message, hint="they count from 0")
    if config.training_mode != "data_parallel" and around.local_rank >= len(ids):
        message = f"device_ids has {len(ids)} GPUs, but local rank {around.local_rank} needs one of its own"
        yield about("device_ids", message=message, hint="name one for each rank of the node")
