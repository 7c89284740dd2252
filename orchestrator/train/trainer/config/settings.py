"""The fields of a training configuration: names, types, defaults, units and meanings.

Holds no rule and reads no text: rules.py and sources.py do, for config.py. Imports no torch.
"""
# ruff: noqa: RUF009  (the calls in the defaults make dataclasses.field objects)

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal


class TrainingMode(enum.StrEnum):
    """How the ranks share the work."""

    DATA_PARALLEL = "data_parallel"
    """One process, one thread for each GPU (torch.nn.DataParallel): for trying things out on one machine."""
    DISTRIBUTED_DATA_PARALLEL = "distributed_data_parallel"
    """One process for each GPU, each with the whole model (DistributedDataParallel)."""
    FULLY_SHARDED = "fully_sharded"
    """One process for each GPU, each with a part of the model (FSDP2): for models that do not fit one GPU."""


Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]


def _setting(default: Any, unit: str, help_text: str) -> Any:
    return field(default=default, metadata={"unit": unit, "help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Every setting of a training run, as written. ``MultiGPUConfig`` checks them and fills in what is missing."""

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
