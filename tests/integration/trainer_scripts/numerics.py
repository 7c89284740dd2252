"""Many small trainings on two ranks in one start; each rank writes what it found into OUT/rank-R.pt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from orchestrator.train import context
from orchestrator.train.errors import DataError, NonFiniteLossError, StopTraining
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.data.loading import Feed, build_feed
from orchestrator.train.trainer.engine.trainer import MultiGPUTrainer, StepResult, make_trainer
from orchestrator.train.trainer.loop.epochs import Collector, check_equal_lengths, evaluate
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager
from orchestrator.train.trainer.loop.recovery import FaultToleranceManager, StopAgreement
from orchestrator.train.trainer.loop.training_state import Progress
from orchestrator.train.trainer.process_group import RankGroup, join_ranks
from tests.integration.trainer_ranks import (
    RANK_BATCH,
    cross_entropy,
    global_batches,
    linear_model,
    momentum,
    normalized_model,
)

SCENARIOS: dict[str, Callable[[RankGroup], Any]] = {}


def scenario(function: Callable[[RankGroup], Any]) -> Callable[[RankGroup], Any]:
    SCENARIOS[function.__name__] = function
    return function


def prepared(place: RankGroup, model: nn.Module, loss_fn: Any = cross_entropy, **settings: Any) -> MultiGPUTrainer:
    trainer = make_trainer(MultiGPUConfig(batch_size=RANK_BATCH, **settings), place)
    trainer.prepare(model, loss_fn=loss_fn, optimizer=momentum)
    return trainer


def mine(place: RankGroup, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0][place.rank :: 2], batch[1][place.rank :: 2]


def train(trainer: MultiGPUTrainer, batches: list[tuple[Tensor, Tensor]] | None = None) -> list[StepResult]:
    return [trainer.train_step(mine(trainer.place, batch)) for batch in batches or global_batches()]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@scenario
def plain(place: RankGroup) -> Any:
    trainer = prepared(place, linear_model())
    losses = [float(result.loss) for result in train(trainer)]
    for _ in range(12):  # DistributedDataParallel times its first ten steps
        trainer.train_step(mine(place, global_batches(1)[0]))
    return {"losses": losses, "share": trainer.communication_share()}


@scenario
def whole_batch(place: RankGroup) -> Any:
    trainer = prepared(place, linear_model())
    train(trainer)
    return state_of(trainer.module)


@scenario
def static_accumulated(place: RankGroup) -> Any:
    """Combine both, as the source's advanced configuration does: each alone works, and torch fails at both."""
    trainer = prepared(place, linear_model(), static_graph=True, gradient_accumulation_steps=2)
    for inputs, targets in (mine(place, batch) for batch in global_batches()):
        for part in (slice(0, 4), slice(4, 8)):
            trainer.train_step((inputs[part], targets[part]))
    return state_of(trainer.module)


@scenario
def clipped(place: RankGroup) -> Any:
    trainer = prepared(place, linear_model(), max_grad_norm=0.05)
    norms = [float(result.grad_norm) for result in train(trainer) if result.grad_norm is not None]
    return {"state": state_of(trainer.module), "norms": norms}


@scenario
def accumulated(place: RankGroup) -> Any:
    """Train on each rank's batch in four parts, one by one and as a group; a hook counts what is sent."""
    found = {}
    for grouped in (False, True):
        trainer = prepared(place, linear_model(), gradient_accumulation_steps=4)
        sent = counted(trainer)
        for batch in global_batches():
            inputs, targets = mine(place, batch)
            parts = [(inputs[start : start + 2], targets[start : start + 2]) for start in range(0, RANK_BATCH, 2)]
            if grouped:
                sent.append(0)
                trainer.clock.begin()
                trainer.update(parts)
                continue
            for part in parts:
                sent.append(0)
                trainer.train_step(part)
        found[grouped] = {"state": state_of(trainer.module), "sent": sent}
    return found


def counted(trainer: MultiGPUTrainer) -> list[int]:
    """Count the buckets that are sent, in the last entry of the list returned."""
    sent: list[int] = []

    def count(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent[-1] += 1
        buffer = bucket.buffer().div_(2)
        work: Any = dist.all_reduce(buffer, async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future

    ddp: Any = trainer.model
    count.__annotations__.clear()  # torch checks them, and requires types, not their names
    ddp.register_comm_hook(None, count)
    return sent


def gradients_at_step(trainer: MultiGPUTrainer) -> list[Tensor]:
    seen: list[Tensor] = []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, _args, _kwargs: seen.extend(
            parameter.grad.clone() for group in optimizer.param_groups for parameter in group["params"]
        )
    )
    return seen


@scenario
def compressed(place: RankGroup) -> Any:
    found = {}
    for name in (False, True):
        trainer = prepared(place, linear_model(), fp16_compression=name)
        seen = gradients_at_step(trainer)
        train(trainer, global_batches(1))
        found[name] = seen
    return found


@scenario
def process_group(_place: RankGroup) -> Any:
    group: Any = dist.distributed_c10d._get_default_group()
    return {"backend": dist.get_backend(), "timeout": group._get_backend(torch.device("cpu")).options._timeout}


class Partly(nn.Module):
    """Model that never uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear_model(), nn.Linear(2, 2)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.used(values)
        return result


@scenario
def unused_parameters(place: RankGroup) -> Any:
    found = {}
    for name, settings in {
        "plain": {},
        "static": {"static_graph": True},
        "find": {"find_unused_parameters": True},
    }.items():
        trainer = prepared(place, Partly(), **settings)
        try:
            train(trainer)
            found[name] = "trained"
        except RuntimeError as error:
            found[name] = str(error).split("\n", 1)[0][:60]
    return found


@scenario
def options_of_ddp(place: RankGroup) -> Any:
    found = {}
    for name, settings in {
        "default": {},
        "small_buckets": {"bucket_cap_mb": 0.0005},
        "copies": {"use_gradient_as_bucket_view": False},
    }.items():
        trainer = prepared(place, linear_model(), **settings)
        storages: list[set[int]] = []
        trainer.optimizer.register_step_pre_hook(
            lambda optimizer, _a, _k, storages=storages: storages.append(
                {p.grad.untyped_storage().data_ptr() for group in optimizer.param_groups for p in group["params"]}
            )
        )
        train(trainer)
        ddp: Any = trainer.model
        found[name] = (len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")), len(storages[-1]))
    return found


@scenario
def buffers(place: RankGroup) -> Any:
    found = {}
    for name in (True, False):
        trainer = prepared(place, normalized_model(), broadcast_buffers=name)
        batches = global_batches(3)
        train(trainer, batches)
        means: list[Tensor] = []
        trainer.module[1].register_forward_pre_hook(  # type: ignore[index,union-attr]
            lambda module, _inputs, means=means: means.append(module.running_mean.clone())
        )
        train(trainer, batches[:1])
        found[name] = means[0]
    return found


@scenario
def mixed(place: RankGroup) -> Any:
    trainer = prepared(place, linear_model(), use_mixed_precision=True)
    train(trainer)
    return {"name": trainer.precision.name, "state": state_of(trainer.module)}


@scenario
def recomputed(place: RankGroup) -> Any:
    trainer = prepared(place, linear_model(), use_gradient_checkpointing=True)
    train(trainer)
    return state_of(trainer.module)


@scenario
def one_ranks_nan(place: RankGroup) -> Any:
    """Train with bad data in the second step, on rank 1 only."""
    found = {}
    for name, settings in {
        "plain": {},
        "clipped": {"max_grad_norm": 1.0},
        "found_by_norm": {"find_unused_parameters": True},
        "accumulated": {"gradient_accumulation_steps": 2},
        "sharded": {"training_mode": "fully_sharded"},
    }.items():
        trainer = prepared(place, linear_model(), **settings)
        skipped = []
        for number, batch in enumerate(global_batches()):
            inputs, targets = mine(place, batch)
            if number == 1 and place.rank == 1:
                inputs = torch.full_like(inputs, float("nan"))
            for part in (slice(0, 4), slice(4, 8)) if name == "accumulated" else (slice(0, 8),):
                result = trainer.train_step((inputs[part], targets[part]))
            skipped.append(result.skipped)
        found[name] = (skipped, trainer.guard.skipped, {k: v.clone() for k, v in trainer.model_state().items()})
    return found


@scenario
def nan_for_ever(place: RankGroup) -> Any:
    """Return the report of rank 0, which names the rank that had the bad data."""
    trainer = prepared(place, linear_model(), max_nonfinite_steps=1)
    faults = FaultToleranceManager(context(), trainer.config, place)
    faults.attach(trainer)
    batch = mine(place, global_batches(1)[0])
    if place.rank == 1:
        batch = (torch.full_like(batch[0], float("nan")), batch[1])
    try:
        for step in range(5):
            trainer.train_step(batch)
            faults.check(Progress(step=step + 1), [batch], 0)
    except NonFiniteLossError as error:
        return str(error)
    return "nothing was noticed"


class Hungry(nn.Module):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.inner, self.limit = linear_model(), limit

    def forward(self, values: Tensor) -> Tensor:
        if len(values) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        result: Tensor = self.inner(values)
        return result


@scenario
def one_ranks_memory(place: RankGroup) -> Any:
    """Train where rank 1 has memory for only two samples at once; the other rank is unaffected."""
    trainer = prepared(place, Hungry(2 if place.rank == 1 else 100), oom_retry=True)
    for batch in global_batches():
        trainer.clock.begin()
        trainer.update([mine(place, batch)])
    return {
        "pieces": trainer.pieces,
        "state": {k.removeprefix("inner."): v for k, v in state_of(trainer.module).items()},
    }


@scenario
def sharded_batch_norm(place: RankGroup) -> Any:
    """Return the last losses with batch normalization, in fp32 and bf16."""

    def last_loss(precision: str) -> float:
        trainer = prepared(place, normalized_model(), training_mode="fully_sharded", precision=precision)
        return float(train(trainer)[-1].loss)

    return [last_loss(precision) for precision in ("fp32", "bf16")]


@scenario
def sharded(place: RankGroup) -> Any:
    trainer = prepared(place, linear_model(), training_mode="fully_sharded", max_grad_norm=0.5)
    local = sum(parameter.to_local().numel() for parameter in trainer.module.parameters())  # type: ignore[attr-defined]
    train(trainer)
    state, optimizer = trainer.model_state(), trainer.optimizer_state()
    saved = [state, optimizer]
    dist.broadcast_object_list(saved, src=0)
    other = prepared(place, linear_model(), training_mode="fully_sharded", max_grad_norm=0.5)
    other.load_states(*saved)
    for one in (trainer, other):
        train(one, global_batches(2))
    accumulating = prepared(place, linear_model(), training_mode="fully_sharded", gradient_accumulation_steps=2)
    for batch in global_batches():
        inputs, targets = mine(place, batch)
        for part in (slice(0, 4), slice(4, 8)):
            accumulating.train_step((inputs[part], targets[part]))
    feed = build_feed(uneven(), trainer.config, place, training=False)
    return {
        "local": local,
        "state": {name: value.clone() for name, value in state.items()},
        "went_on": (trainer.model_state(), other.model_state()),
        "accumulated": accumulating.model_state(),
        "evaluated": evaluate(other, feed, {}),
        "precise": prepared(place, linear_model(), training_mode="fully_sharded", precision="bf16")
        .train_step(mine(place, global_batches(1)[0]))
        .loss,
    }


def uneven() -> TensorDataset:
    """Return seventeen samples: the ranks get batches of different number and size."""
    (inputs, targets) = global_batches(1, size=17)[0]
    return TensorDataset(inputs, targets)


@scenario
def evaluated(place: RankGroup) -> Any:
    """Evaluate with batch normalization, whose buffers must not be exchanged while ranks have different numbers of batches."""
    trainer = prepared(place, normalized_model())
    feed = build_feed(uneven(), trainer.config, place, training=False)
    metrics = {"accuracy": lambda outputs, targets: (outputs.argmax(dim=1) == targets).float().mean()}
    return evaluate(trainer, feed, metrics)


@scenario
def stopped_together(place: RankGroup) -> Any:
    """Count the steps when only rank 1 gets the stop, in its fifth step: both ranks take the same steps."""
    steps: list[int] = []
    agreement = StopAgreement(place, lambda: place.rank == 1 and len(steps) >= 5)
    while not agreement.reached():
        dist.all_reduce(torch.zeros(1))
        steps.append(1)
    return len(steps)


@scenario
def different_lengths(place: RankGroup) -> Any:
    loader = DataLoader(uneven(), batch_size=4 if place.rank else 2)
    try:
        check_equal_lengths(Feed(loader), place, 0)
    except DataError as error:
        return str(error)
    return "nothing was noticed"


@scenario
def streams_of_different_lengths(place: RankGroup) -> Any:
    def stream() -> Iterator[int]:
        yield from range(7 if place.rank else 4)

    feed = Feed(stream())
    agree = check_equal_lengths(feed, place, 0)
    collector = Collector(feed.start(0), 3, place, agree=agree)
    taken = []
    while group := collector.take(0):
        taken.append(len(group))
    return agree, taken


@scenario
def saved_in_the_middle(place: RankGroup) -> Any:
    """Save on two ranks in the middle of an epoch, for another number of ranks to continue from."""
    config = MultiGPUConfig(batch_size=4, global_batch_size=16, checkpoint_frequency=5, progress_bar=False)
    manager = MultiGPUTrainingManager(config)
    model = linear_model()

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        if manager.progress.step == 5:
            raise StopTraining(5)
        return cross_entropy(outputs, targets)

    inputs, targets = global_batches(1, size=64)[0]
    manager.setup_training(model, TensorDataset(inputs, targets), loss_fn=loss_fn, optimizer=momentum)
    try:
        manager.fit(3)
    except StopTraining:
        return manager.trainer.accumulate, manager.progress.epoch, manager.progress.position
    return None


def main() -> None:
    out = Path(sys.argv[1])
    place = join_ranks(MultiGPUConfig(batch_size=RANK_BATCH, backend="gloo", timeout=timedelta(seconds=77)))
    found = {}
    for name, function in SCENARIOS.items():
        found[name] = function(place)
        print(name, flush=True)
    torch.save(found, out / f"rank-{place.rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
