"""One training step, for any way of exchanging gradients between ranks.

`MultiGPUTrainer` owns model, optimizer, precision and the order of operations within a step; its subclasses define how
a model is spread over ranks. Options of the model keep its parameter objects and their names, so that existing optimizers
and checkpoints still fit; weights and optimizer state stay fp32. It handles no epochs, files or logs, and is usable alone:

    trainer = DistributedDataParallelTrainer(config, join_ranks(config))
    trainer.prepare(model, loss_fn=loss_fn, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for batch in loader:
        result = trainer.train_step(batch)
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from orchestrator.spec.trainer import TrainingMode
from orchestrator.train.errors import ConfigError, OutOfMemoryError
from orchestrator.train.trainer.data.batches import (
    LossFunction,
    compute_loss,
    count,
    split,
    targets_of,
    to_device,
)
from orchestrator.train.trainer.engine.finite import FiniteGuard
from orchestrator.train.trainer.engine.memory import describe_shortage, free_unused, is_out_of_memory
from orchestrator.train.trainer.engine.step_clock import Part, make_clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from orchestrator.train.script.elastic import BatchShare
    from orchestrator.train.trainer.config.config import MultiGPUConfig
    from orchestrator.train.trainer.process_group import RankGroup

OptimizerFactory = Callable[[Iterable[nn.Parameter]], "Optimizer"]
SchedulerFactory = Callable[["Optimizer"], "LRScheduler"]
MetricFunction = Callable[[Any, Any], Tensor]

_SCALE_SEARCH = 16  # fp16: consecutive overflows that are normal while the scale is being found


class StepResult(NamedTuple):
    """The result of one call. `loss` is this rank's mean, detached, on the device; counts are this rank's.

    `value` is the loss as a number, where that is known without waiting.
    `updated`: an optimizer step was due (the last of the accumulated batches). `skipped`: it was due, but left out because
    something was not finite; False where only the device can tell. `grad_norm` is known when it was needed.

    `whole` is the same for the whole optimizer step, in the result of the call that ends it; None: this call was all of it.
    """

    loss: Tensor
    samples: int
    tokens: int
    updated: bool
    skipped: bool
    grad_norm: Tensor | None
    value: float | None = None
    whole: StepResult | None = None

    @property
    def step(self) -> StepResult:
        """Return the optimizer step that this call has ended, with the batches that earlier calls accumulated."""
        return self.whole or self


class MultiGPUTrainer(ABC):
    """Runs training steps on one rank. Call `prepare` once, then `train_step` for each batch."""

    shards_parameters = False
    """Whether a rank holds only a part of each parameter."""

    def __init__(self, config: MultiGPUConfig, place: RankGroup, share: BatchShare | None = None) -> None:
        self.config = config
        self.place = place
        self.share = share
        """This rank's part of each step, where ranks may have different ones: in an elastic job, or by measured speed."""
        self.precision = MixedPrecision(config, place.device)
        self.clock = make_clock(place.device)
        self.accumulate = accumulation(config, place.world_size) if share is None else share.accumulation
        """Batches per optimizer step."""
        self.pieces = 1
        """Parts into which a batch is split because memory ran out; 1 until then."""
        self.measure_norm = False
        """Set to make the next step compute its gradient's norm, if it does not anyway."""
        self._passes = 0  # passes done in the current optimizer step
        self._accumulated: list[StepResult] = []  # their results
        self._exchanging = False  # ranks wait for each other: a pass cannot be undone any more

    @property
    def samples_per_step(self) -> int:
        """Return the samples of one optimizer step, of all ranks together."""
        if self.share is not None:
            return self.share.global_batch
        return self.config.batch_size * self.place.world_size * self.accumulate

    @property
    def ranks_worth(self) -> float:
        """Return the ratio of all ranks' samples to this rank's: the number of ranks, where they have equally many."""
        if self.share is None:
            return float(self.place.world_size)
        return self.share.global_batch / self.share.samples

    # Set-up

    def prepare(
        self,
        model: nn.Module,
        *,
        loss_fn: LossFunction | None = None,
        optimizer: Optimizer | OptimizerFactory | None = None,
        scheduler: LRScheduler | SchedulerFactory | None = None,
    ) -> nn.Module:
        """Spread `model` over the ranks and create its optimizer; return the wrapped model.

        Without a `loss_fn` the model returns its own loss. Without an `optimizer` it is AdamW with lr 1e-3. Raises
        ConfigError for what the model does not support.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError("the model has no parameter that requires a gradient: there is nothing to train")
        self.loss_fn = loss_fn
        self.module = prepare_model(model, self.config, self.place)
        self.model = self.wrap(self.module)
        if self.config.compile:
            self.model.compile(
                backend=self.config.compile_backend or "inductor",
                **({} if self.config.compile_mode is None else {"mode": self.config.compile_mode}),
            )
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = self._make_optimizer(optimizer)
        self.scheduler = self._make_scheduler(scheduler)
        self._skips_on_device = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        self.guard = FiniteGuard(
            self.module,
            self.place,
            limit=self.config.max_nonfinite_steps + (0 if self.precision.scaler is None else _SCALE_SEARCH),
            sharded=self.shards_parameters,
            may_poison=not (self.config.find_unused_parameters or self.config.static_graph),
        )
        self.model.train()
        return self.model

    @abstractmethod
    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the model for forward passes; `module` is on its device, with all options applied."""

    @abstractmethod
    def alone(self) -> AbstractContextManager[Any]:
        """Return a context in which backward passes accumulate gradients without sending them to other ranks."""

    def first_of_static_graph(self) -> bool:
        """Whether this backward pass must reduce gradients, at any place in the step. Called once before each pass."""
        return False

    def communication_share(self) -> float | None:
        """Return the share of the backward pass that is spent waiting for other ranks; None when it is not measured."""
        return None

    def _make_optimizer(self, given: Optimizer | OptimizerFactory | None) -> Optimizer:
        if given is None:
            return torch.optim.AdamW(self.parameters, lr=1e-3, fused=self.place.device.type == "cuda")
        if not isinstance(given, torch.optim.Optimizer):
            return given(self.parameters)
        if self.shards_parameters:
            raise ConfigError(
                "fully_sharded replaces the parameters, which an optimizer made before still holds: pass a function, "
                "optimizer=lambda parameters: AdamW(parameters, lr=...)"
            )
        known = {id(parameter) for parameter in self.module.parameters()}
        if not all(id(parameter) in known for group in given.param_groups for parameter in group["params"]):
            raise ConfigError("the optimizer holds parameters that are not the model's: make it from this model's")
        return given

    def _make_scheduler(self, given: LRScheduler | SchedulerFactory | None) -> LRScheduler | None:
        if given is None or isinstance(given, torch.optim.lr_scheduler.LRScheduler):
            if given is not None and given.optimizer is not self.optimizer:
                raise ConfigError("the scheduler belongs to another optimizer: make it from the one that is passed")
            return given
        return given(self.optimizer)

    # Steps

    def train_step(self, batch: Any) -> StepResult:
        """Run one forward and backward pass; on the last of the accumulated batches also update the weights.

        Raises DataError, ModelOutputError, OutOfMemoryError (all naming the remedy), and whatever the model raises.
        """
        if self._passes == 0:
            self.clock.begin()
            self._accumulated = []
            self.guard.begin()
        last = self._passes + 1 == self.accumulate
        try:
            loss = self._pass(batch, self._weight(batch, 1.0 / self.accumulate), last=last)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise self.shortage(error) from error
            raise
        self._passes = 0 if last else self._passes + 1
        good, norm = self._update() if last else (True, None)
        samples, tokens = count(batch)
        result = StepResult(loss, samples, tokens, last, not good, norm)
        if not last:
            self._accumulated.append(result)
            return result
        self.clock.end()
        return result._replace(whole=_together([*self._accumulated, result])) if self._accumulated else result

    def update(self, batches: Sequence[Any]) -> StepResult:
        """Run one optimizer step over `batches`, each weighted by its samples. Call `clock.begin` before fetching them.

        With oom_retry, runs out of memory only when a single sample does. Raises as `train_step` does.
        """
        while True:
            try:
                return self._attempt(batches)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                shortage, cause = self.shortage(error), error.with_traceback(None)
            if not self.halve(batches):
                raise shortage from cause

    def _attempt(self, batches: Sequence[Any]) -> StepResult:
        self.guard.begin()
        if len(batches) == 1:
            samples, tokens = count(batches[0])
            loss = self._pass(batches[0], self._weight(batches[0], 1.0), last=True)
            value = self.guard.value if self.pieces == 1 else None
        else:
            counts = [count(batch) for batch in batches]
            samples, tokens = sum(size for size, _ in counts), sum(more for _, more in counts)
            parts = [
                self._pass(batch, self._weight(batch, size / samples), last=number == len(batches)) * (size / samples)
                for number, (batch, (size, _)) in enumerate(zip(batches, counts, strict=True), start=1)
            ]
            loss, value = torch.stack(parts).sum(), None
        good, norm = self._update()
        self.clock.end()
        return StepResult(loss, samples, tokens, True, not good, norm, value)

    def _weight(self, batch: Any, of_rank: float) -> float:
        """Return the weight of the mean loss of `batch` in the mean over ranks; `of_rank` is its part of this rank's work."""
        if self.share is None:
            return of_rank
        return count(batch)[0] * self.place.world_size / self.share.global_batch

    def _pass(self, batch: Any, weight: float, *, last: bool) -> Tensor:
        """Run forward and backward over one batch, in as many parts as memory requires; return its mean loss."""
        if self.pieces == 1:
            return self._part(batch, weight, last=last)
        parts = split(batch, self.pieces)
        losses = [
            self._part(part, weight / self.pieces, last=last and number == self.pieces)
            for number, part in enumerate(parts, start=1)
        ]
        return torch.stack(losses).mean()

    def _part(self, batch: Any, weight: float, *, last: bool) -> Tensor:
        if self.first_of_static_graph() or last:
            return self._forward_backward(batch, weight, exchange=self.place.distributed)
        with self.alone():
            return self._forward_backward(batch, weight, exchange=False)

    def _forward_backward(self, batch: Any, weight: float, *, exchange: bool) -> Tensor:
        clock = self.clock
        batch = to_device(batch, self.place.device)
        clock.mark(Part.DATA)
        with self.precision.autocast():
            loss, _ = compute_loss(self.model, batch, self.loss_fn)
        clock.mark(Part.FORWARD)
        start = self.guard.look(loss)
        if start is not None:
            if weight != 1.0:
                start = start * weight
            if self.precision.scaler is not None:
                start = self.precision.scaler.scale(start)
            self._exchanging = exchange
            if exchange:
                clock.exchange(start)
            start.backward()
            self._exchanging = False
        clock.mark(Part.BACKWARD)
        return loss.detach()

    def _update(self) -> tuple[bool, Tensor | None]:
        """Clip, step and clear; return whether the step was taken, and the gradient's norm if known."""
        scaler, limit = self.precision.scaler, self.config.max_grad_norm
        norm: Tensor | None = None
        if scaler is not None and (limit is not None or self.measure_norm):
            scaler.unscale_(self.optimizer)
        decides = limit is not None or self.guard.needs_norm  # equal on all ranks, unlike `measure_norm`
        if limit is not None:
            norm = _whole(clip_grad_norm_(self.parameters, limit))
        elif self.measure_norm or (scaler is None and decides):
            norm = _whole(get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
        self.measure_norm = False
        good = self._step(norm if decides else None) if scaler is None else self._scaled_step(scaler)
        self.optimizer.zero_grad(set_to_none=True)
        if good and self.scheduler is not None:
            self.scheduler.step()
        self.clock.mark(Part.OPTIMIZER)
        return good, norm

    def _step(self, norm: Tensor | None) -> bool:
        verdict = self.guard.allows(norm)
        if isinstance(verdict, Tensor):
            if self._skips_on_device:
                self._step_unless(verdict)
                return True
            verdict = not bool(verdict)  # waits for the device
        if verdict:
            self.optimizer.step()
        self.guard.count(good=verdict)
        return verdict

    def _step_unless(self, bad: Tensor) -> None:
        """Let the device itself skip the step: the protocol between GradScaler and fused optimizers."""
        optimizer = cast("Any", self.optimizer)
        optimizer.grad_scale, optimizer.found_inf = None, bad
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        self.guard.count_on_device(bad)

    def _scaled_step(self, scaler: torch.amp.GradScaler) -> bool:
        before = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        good = scaler.get_scale() >= before
        self.guard.count(good=good)
        return good

    # Out of memory

    def shortage(self, error: BaseException) -> OutOfMemoryError:
        """Return what ran out, with the sizes and the remedies."""
        return OutOfMemoryError(
            describe_shortage(
                error,
                self.config,
                self.place.device,
                accumulate=self.accumulate * self.pieces,
                parameters=sum(parameter.numel() for parameter in self.parameters),
            )
        )

    def halve(self, batches: Sequence[Any]) -> bool:
        """Split batches into twice as many parts from now on, if configured and possible; discard this step so far.

        Not possible once ranks have begun to exchange gradients: the others cannot undo that.
        """
        parts = self.pieces * 2
        if not self.config.oom_retry or self._exchanging or any(count(batch)[0] % parts for batch in batches):
            return False
        self.pieces = parts
        self._passes = 0
        self.optimizer.zero_grad(set_to_none=True)
        free_unused(self.place.device)
        return True

    # Evaluation

    @torch.no_grad()
    def eval_step(self, batch: Any, metrics: Mapping[str, MetricFunction]) -> dict[str, Tensor]:
        """Return the loss of `batch`, and each metric (a mean over its samples), as tensors on the device. No gradient."""
        batch = to_device(batch, self.place.device)
        with self.precision.autocast():
            loss, outputs = compute_loss(self.evaluated, batch, self.loss_fn)
        targets = targets_of(batch)
        values = {name: torch.as_tensor(metric(outputs, targets)) for name, metric in metrics.items()}
        return {"loss": loss, **values}

    @property
    def evaluated(self) -> nn.Module:
        """Return the model for evaluation: without waits for other ranks, which may have no batch left."""
        return self.module

    # State

    def model_state(self) -> dict[str, Any]:
        """Return the model's complete state dictionary on rank 0; elsewhere it may be partial. Every rank calls it."""
        return self.module.state_dict()

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's complete state dictionary on rank 0."""
        return self.optimizer.state_dict()

    def load_states(self, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        """Load the results of `model_state` and `optimizer_state`, in a run of any number of ranks."""
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(cast("dict[str, Any]", optimizer))


def accumulation(config: MultiGPUConfig, world_size: int) -> int:
    """Return the number of batches per optimizer step: as configured, or as many as make up the global batch."""
    if config.global_batch_size is None:
        return config.gradient_accumulation_steps
    return config.global_batch_size // (config.batch_size * world_size)


def _together(parts: Sequence[StepResult]) -> StepResult:
    """Return the optimizer step whose accumulated batches are `parts`; its loss is the mean over its samples."""
    samples, tokens = sum(part.samples for part in parts), sum(part.tokens for part in parts)
    weighed = [part.loss * (part.samples / samples) for part in parts]
    return parts[-1]._replace(loss=torch.stack(weighed).sum(), samples=samples, tokens=tokens)


def _whole(norm: Tensor) -> Tensor:
    """Return the full value of a norm over sharded parameters."""
    together = getattr(norm, "full_tensor", None)
    return norm if together is None else cast("Tensor", together())


def prepare_model(model: nn.Module, config: MultiGPUConfig, place: RankGroup) -> nn.Module:
    """Put `model` on the rank's device and apply the options. Raises ConfigError for one that the model does not support."""
    model = model.to(place.device)
    if config.sync_bn and place.distributed and place.device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.use_gradient_checkpointing:
        recompute_activations(model)
    return model


def recompute_activations(model: nn.Module) -> int:
    """Make `model` keep only the inputs of its blocks, and recompute the rest in the backward pass; return the number of blocks.

    Uses the switch of Hugging Face models. Raises ConfigError where no blocks are found.
    """
    switch = getattr(model, "gradient_checkpointing_enable", None)
    if callable(switch):
        switch(gradient_checkpointing_kwargs={"use_reentrant": False})
        return 1
    blocks = find_blocks(model)
    if not blocks:
        raise ConfigError(
            "use_gradient_checkpointing found no blocks: the model has neither an nn.ModuleList nor an nn.Sequential "
            "with parts that have parameters; call torch.utils.checkpoint.checkpoint in its forward, and turn this off"
        )
    for block in blocks:
        block.forward = functools.partial(_recomputed, block.forward)
    return len(blocks)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: the elements of the outermost nn.ModuleLists, else of the outermost nn.Sequentials."""
    for kind in (nn.ModuleList, nn.Sequential):
        found = [part for group in _outermost(model, kind) for part in group.children() if _learns(part)]
        if found:
            return found
    return []


def _outermost(module: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]


def _learns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


PrecisionName = Literal["fp32", "bf16", "fp16"]

_BF16_CAPABILITY = (8, 0)  # older GPUs run bf16 too, but in software


class MixedPrecision:
    """The precision of a run: `name`, the autocast around a forward pass, and the scaler (None without fp16)."""

    def __init__(self, config: MultiGPUConfig, device: torch.device) -> None:
        self.name: PrecisionName = resolve(config.precision or "fp32", device)
        self.dtype: torch.dtype | None = {
            "fp32": None,
            "bf16": torch.bfloat16,
            "fp16": torch.float16,
        }[self.name]
        self.scaler = torch.amp.GradScaler(device.type) if self.name == "fp16" else None
        self._autocast: AbstractContextManager[None] = (
            nullcontext() if self.dtype is None else torch.autocast(device.type, dtype=self.dtype)
        )

    def autocast(self) -> AbstractContextManager[None]:
        """Enter this around the forward pass and the loss. One object, created once: steps are not nested."""
        return self._autocast


def resolve(precision: str, device: torch.device) -> PrecisionName:
    """Return what `auto` means on `device`; any other value unchanged."""
    if precision != "auto":
        return cast("PrecisionName", precision)
    if device.type != "cuda" or torch.version.hip is not None:
        return "bf16"
    return "bf16" if torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY else "fp16"


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
