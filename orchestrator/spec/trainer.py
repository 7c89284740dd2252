"""The settings of `trainer:` in job.yaml and of ``orchestrator.train.MultiGPUConfig``: one definition of each, as `model` has of the other keys.

Its type, bounds, default, unit and meaning: job.yaml's reader, the JSON Schema, the command line of a training script and the
table in docs/training.md are made from it. Rules between settings are those of the training system. Imports no torch and no pydantic.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# The annotations are read when the program runs.
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from orchestrator.spec.fields import (
    Boolean,
    Choice,
    Doc,
    Duration,
    Kind,
    ListNode,
    Node,
    Null,
    Positive,
    Record,
    ScalarNode,
    Schema,
    Text,
    Whole,
    written,
)
from orchestrator.spec.problems import BadValueError, quoted

if TYPE_CHECKING:
    from collections.abc import Sequence


class TrainingMode(enum.StrEnum):
    """Ways in which the ranks share the work."""

    DATA_PARALLEL = "data_parallel"
    """One process, one thread for each GPU (torch.nn.DataParallel): for trying things out on one machine."""
    DISTRIBUTED_DATA_PARALLEL = "distributed_data_parallel"
    """One process for each GPU, each with the whole model (DistributedDataParallel)."""
    FULLY_SHARDED = "fully_sharded"
    """One process for each GPU, each with a part of the model (FSDP2): for models that do not fit one GPU."""


Precision = Literal["auto", "fp32", "bf16", "fp16"]
Balance = Literal["equal", "measured"]
_BACKENDS = ("nccl", "gloo", "mpi", "cpu:gloo,cuda:nccl")
_MOST = 10**18 - 1


class _Indices(Kind):
    """Indices of different GPUs: a list, or numbers with commas between them."""

    def read(self, node: Node) -> tuple[int, ...]:
        """Read the indices."""
        numbers = [Whole(0).read(item) for item in self._items(node)]
        if not numbers or len(set(numbers)) < len(numbers):
            raise BadValueError(f"expected the indices of different GPUs, got {numbers}", "write them such as [0, 1]")
        return tuple(numbers)

    def _items(self, node: Node) -> Sequence[Node]:
        if isinstance(node, ListNode):
            return node.items
        text = written(node, "a list of GPU indices")
        parts = text.strip("[]").split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise BadValueError(
                f"{quoted(text)} is not a list of GPU indices", "write [0, 1], or numbers with commas: 0,1"
            )
        return [ScalarNode(text=part.strip(), kind="integer", mark=node.mark) for part in parts]

    def write(self, value: Sequence[int]) -> list[int]:
        """Return a list."""
        return list(value)

    def describe(self) -> Schema:
        """Describe a list, and a text of numbers."""
        numbers = {"type": "array", "items": Whole(0).describe(), "minItems": 1, "uniqueItems": True}
        return {"anyOf": [numbers, Whole(0).describe(), {"type": "string", "pattern": r"^[\[0-9, \]]+$"}]}


T = TypeVar("T")
_Maybe = Annotated[T | None, Null()]
_YesNo = Annotated[bool, Boolean()]
_Count = Annotated[int, Whole(1)]
_Natural = Annotated[int, Whole(0)]
_Positive = Annotated[float, Positive()]
_Time = Annotated[timedelta, Duration(minimum=timedelta(milliseconds=1))]
_Name = Annotated[str, Text("a name that torch.compile knows")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings(Record):
    """Every setting of a training run, as written. ``MultiGPUConfig`` checks them and fills in what is missing."""

    training_mode: Annotated[
        TrainingMode,
        Choice(words=tuple(mode.value for mode in TrainingMode)),
        Doc("how ranks share the work: one process per GPU by default", "name"),
    ] = TrainingMode.DISTRIBUTED_DATA_PARALLEL
    device_ids: Annotated[
        _Maybe[Annotated[tuple[int, ...], _Indices()]],
        Doc("data_parallel: the GPUs to use; else: the GPU of each local rank, in their order", "CUDA indices"),
    ] = None
    batch_size: Annotated[_Count, Doc("samples per rank and forward pass", "samples")] = 32
    global_batch_size: Annotated[
        _Maybe[_Count],
        Doc("samples per optimizer step over all ranks; sets gradient_accumulation_steps to fit", "samples"),
    ] = None
    balance: Annotated[
        Balance,
        Choice(words=("equal", "measured")),
        Doc(
            "measured: slower ranks get fewer samples of each step, by their step times, changed at checkpoints", "name"
        ),
    ] = "equal"
    world_size: Annotated[_Maybe[_Count], Doc("number of ranks; WORLD_SIZE, else 1", "ranks")] = None
    rank: Annotated[_Maybe[_Natural], Doc("this process among all ranks; RANK, else 0", "rank")] = None
    local_rank: Annotated[_Maybe[_Natural], Doc("this process among its node's ranks; LOCAL_RANK, else 0", "rank")] = (
        None
    )
    backend: Annotated[
        _Maybe[Annotated[str, Choice(words=_BACKENDS)]], Doc("of torch.distributed: nccl on GPUs, else gloo", "name")
    ] = None
    timeout: Annotated[_Time, Doc("a collective that takes longer is an error", "duration")] = timedelta(minutes=30)

    use_mixed_precision: Annotated[
        _Maybe[_YesNo],
        Doc("compute in a lower precision where that is safe (autocast); weights stay fp32", "yes/no"),
    ] = None
    precision: Annotated[
        _Maybe[Annotated[Precision, Choice(words=("auto", "fp32", "bf16", "fp16"))]],
        Doc(
            "auto: bf16 where the device computes it, else fp16 with gradient scaling",
            "name",
        ),
    ] = None
    gradient_accumulation_steps: Annotated[_Count, Doc("forward passes per optimizer step", "batches")] = 1
    max_grad_norm: Annotated[
        _Maybe[_Positive], Doc("clip the gradient's 2-norm, over all parameters, to this", "norm")
    ] = None
    use_gradient_checkpointing: Annotated[
        _YesNo, Doc("compute activations again in the backward pass instead of keeping them", "yes/no")
    ] = False
    compile: Annotated[_YesNo, Doc("torch.compile the model", "yes/no")] = False
    compile_mode: Annotated[_Maybe[_Name], Doc("of torch.compile: reduce-overhead, max-autotune, ...", "name")] = None
    compile_backend: Annotated[_Maybe[_Name], Doc("of torch.compile; inductor", "name")] = None

    find_unused_parameters: Annotated[
        _YesNo, Doc("the model does not use all its parameters in each step", "yes/no")
    ] = False
    broadcast_buffers: Annotated[
        _YesNo, Doc("rank 0's buffers (running statistics) go to all ranks each step", "yes/no")
    ] = True
    sync_bn: Annotated[_YesNo, Doc("batch normalization over the batches of all ranks", "yes/no")] = False
    fp16_compression: Annotated[_Maybe[_YesNo], Doc("send gradients as fp16: half the bytes; default no", "yes/no")] = (
        None
    )
    use_fp16_allreduce: Annotated[_Maybe[_YesNo], Doc("the same as fp16_compression", "yes/no")] = None
    use_gradient_as_bucket_view: Annotated[
        _YesNo, Doc("gradients are views of the communication buffers, which saves a copy and its memory", "yes/no")
    ] = True
    bucket_cap_mb: Annotated[
        _Maybe[_Positive], Doc("gradients are sent in pieces of about this size; default 25", "MiB")
    ] = None
    reduce_bucket_size: Annotated[_Maybe[_Count], Doc("the same as bucket_cap_mb", "bytes")] = None
    static_graph: Annotated[_YesNo, Doc("every step uses the same parameters in the same order", "yes/no")] = False

    pin_memory: Annotated[
        _Maybe[_YesNo], Doc("batches in page-locked memory, copied to the GPU asynchronously", "yes/no")
    ] = None
    num_workers: Annotated[
        _Natural, Doc("processes per rank that load data; 0: the training process does", "processes")
    ] = 0
    prefetch_factor: Annotated[_Maybe[_Count], Doc("batches that each worker loads ahead; default 2", "batches")] = None
    persistent_workers: Annotated[_Maybe[_YesNo], Doc("keep the workers between epochs; default yes", "yes/no")] = None
    shuffle: Annotated[_YesNo, Doc("another order of the training data in each epoch, from the seed", "yes/no")] = True
    seed: Annotated[
        int, Whole(0, _MOST), Doc("of the order of the data and of each rank's random numbers", "number")
    ] = 0

    enable_fault_tolerance: Annotated[_YesNo, Doc("save checkpoints, resume from them, leave on SIGTERM", "yes/no")] = (
        True
    )
    checkpoint_frequency: Annotated[
        _Maybe[_Count],
        Doc("optimizer steps between checkpoints; default: checkpoint.interval of job.yaml, else 1000", "steps"),
    ] = None
    recovery_timeout: Annotated[
        _Time, Doc("how long a (re)started rank waits for the others to be back", "duration")
    ] = timedelta(minutes=5)
    max_nonfinite_steps: Annotated[
        _Natural,
        Doc("updates skipped in a row because the loss is NaN or infinite before training stops; 0: none", "steps"),
    ] = 3
    oom_retry: Annotated[
        _YesNo, Doc("out of memory: halve the batch, double the accumulation, and try the step again", "yes/no")
    ] = False

    log_interval: Annotated[_Time, Doc("between lines in the log", "duration")] = timedelta(seconds=10)
    progress_bar: Annotated[_Maybe[_YesNo], Doc("on rank 0; default: when there is a terminal", "yes/no")] = None
    flops_per_sample: Annotated[
        _Maybe[_Positive],
        Doc("of one sample, forward and backward, for MFU; measured once where it is not given", "FLOP"),
    ] = None
    peak_flops: Annotated[
        _Maybe[_Positive],
        Doc("one GPU's peak in the precision used, for MFU; from a table of known GPUs", "FLOP/s"),
    ] = None
