"""Ways to spread a model over ranks: one process with many GPUs, a whole model per rank, a part of it per rank."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from orchestrator.spec.trainer import TrainingMode
from orchestrator.train.trainer.engine.trainer import MultiGPUTrainer, find_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from orchestrator.train.script.elastic import BatchShare
    from orchestrator.train.trainer.config.config import MultiGPUConfig
    from orchestrator.train.trainer.process_group import RankGroup

# renamed in torch 2.13
_BUFFER_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class DataParallelTrainer(MultiGPUTrainer):
    """One process that gives a part of each batch to each GPU. With one GPU, or none, the model is unchanged."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """Spread `module` over the configured GPUs, or all that are visible."""
        if self.place.device.type != "cuda":
            return module
        ids = list(self.config.device_ids or range(torch.cuda.device_count()))
        return module if len(ids) == 1 else DataParallel(module, device_ids=ids)

    def alone(self) -> AbstractContextManager[Any]:
        """Do nothing: there is one rank."""
        return nullcontext()


class DistributedDataParallelTrainer(MultiGPUTrainer):
    """Trainer with the whole model in each rank; the backward pass averages gradients. One rank needs no wrapper."""

    _unlearned = False  # whether a static graph must still be learned

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap `module` with every option of DistributedDataParallel that is configured."""
        if not self.place.distributed:
            return module
        self._unlearned = self.config.static_graph
        config, device = self.config, self.place.device
        buffers: dict[str, Any] = {} if config.broadcast_buffers else {_BUFFER_OPTION: False}
        wrapped = DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=config.bucket_cap_mb,
            find_unused_parameters=config.find_unused_parameters,
            gradient_as_bucket_view=config.use_gradient_as_bucket_view,
            static_graph=config.static_graph,
            **buffers,
        )
        if config.fp16_compression:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            wrapped.register_comm_hook(state=None, hook=fp16_compress_hook)
        return wrapped

    def first_of_static_graph(self) -> bool:
        """Return True for the first backward pass of a static graph, which must reduce; the sum over the step is the same."""
        first, self._unlearned = self._unlearned, False
        return first

    def alone(self) -> AbstractContextManager[Any]:
        """Accumulate gradients without reducing them."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    def communication_share(self) -> float | None:
        """Return DistributedDataParallel's own measurement, made in one step of a hundred."""
        if not isinstance(self.model, DistributedDataParallel):
            return None
        times = self.model._get_ddp_logging_data()  # noqa: SLF001 - torch has no public function for it
        sent, hidden = times.get("backward_comm_time"), times.get("backward_compute_comm_overlap_time")
        computed = times.get("backward_compute_time")
        if not (isinstance(sent, int) and isinstance(hidden, int) and isinstance(computed, int) and computed > 0):
            return None
        waited = max(0, sent - hidden)
        return waited / (computed + waited)


class FullyShardedTrainer(MultiGPUTrainer):
    """Trainer with a part of each parameter, of its gradient and of its optimizer state in each rank (FSDP2)."""

    shards_parameters = True

    def wrap(self, module: nn.Module) -> nn.Module:
        """Shard the model's blocks one by one, then the rest."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        for tensor in (
            *module.parameters(),
            *module.buffers(),
        ):  # as DistributedDataParallel does: equal initial values
            dist.broadcast(tensor.detach(), src=0)
        mesh = init_device_mesh(self.place.device.type, (self.place.world_size,))
        lower = self.precision.dtype
        policy = MixedPrecisionPolicy() if lower is None else MixedPrecisionPolicy(lower, torch.float32)
        # Batch normalization accepts lower-precision inputs, but no lower-precision weights beside its fp32 statistics.
        whole = [part for part in module.modules() if lower is not None and isinstance(part, _BatchNorm)]
        for norm in whole:
            fully_shard(norm, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        for block in find_blocks(module):
            if block not in whole:
                fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        return module

    def alone(self) -> AbstractContextManager[Any]:
        """Accumulate whole gradients in each rank instead of reducing them."""
        return self._alone()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        switch: Any = self.module
        switch.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            switch.set_requires_gradient_sync(True)

    def model_state(self) -> dict[str, Any]:
        """Return the whole model, gathered on the CPU of rank 0."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(self.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def optimizer_state(self) -> dict[str, Any]:
        """Return the whole optimizer state, gathered on the CPU of rank 0, by the names of parameters."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_optimizer_state_dict(self.module, self.optimizer, options=options))

    def load_states(self, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        """Load whole states; every rank has read them."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        set_model_state_dict(self.module, dict(model), options=options)
        set_optimizer_state_dict(self.module, self.optimizer, dict(optimizer), options=options)


def make_trainer(config: MultiGPUConfig, place: RankGroup, share: BatchShare | None = None) -> MultiGPUTrainer:
    """Return the trainer for the configured mode; in an elastic job, with this rank's `share` of each step."""
    match config.training_mode:
        case TrainingMode.DATA_PARALLEL:
            return DataParallelTrainer(config, place, share)
        case TrainingMode.DISTRIBUTED_DATA_PARALLEL:
            return DistributedDataParallelTrainer(config, place, share)
        case TrainingMode.FULLY_SHARDED:
            return FullyShardedTrainer(config, place, share)
