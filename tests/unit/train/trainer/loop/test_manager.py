"""One process trains from beginning to end: the guarantees of the manager without any other rank."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from orchestrator.train.errors import (
    ConfigError,
    DataError,
    ModelOutputError,
    NonFiniteLossError,
    OutOfMemoryError,
    StopTraining,
)
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager
from orchestrator.train.trainer.loop.recovery import Recovery
from tests.unit.train.trainer.builders import (
    a_context,
    a_dataset,
    a_manager,
    a_model,
    accuracy,
    cross_entropy,
    equal,
    sgd,
    weights,
)


def plain_loop(model: nn.Module, dataset: TensorDataset, order: list[list[int]]) -> None:
    """Train with a plain loop, written by hand."""
    optimizer = sgd(model.parameters())
    for indices in order:
        inputs, targets = dataset[indices]
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_training_is_what_a_plain_loop_does(tmp_path: Path) -> None:
    """The weights are bit-identical to those of the loop that the trainer replaces."""
    dataset = a_dataset()
    with a_manager(tmp_path) as manager:
        model = a_model()
        manager.setup_training(model, dataset, loss_fn=cross_entropy, optimizer=sgd)
        sampler = next(iter(manager._feeds.values())).sampler
        assert sampler is not None
        order = []
        for epoch in range(2):
            sampler.seek(epoch)
            order += list(sampler)
        manager.fit(2)
    by_hand = a_model()
    plain_loop(by_hand, dataset, order)
    assert equal(weights(model), weights(by_hand))


def test_it_learns_and_says_how_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with a_manager(tmp_path) as manager:
        manager.setup_training(
            a_model(),
            a_dataset(256),
            a_dataset(100, seed=2),
            loss_fn=cross_entropy,
            optimizer=sgd,
            metrics={"accuracy": accuracy},
        )
        result = manager.fit(6)
    assert result.history[-1]["val_accuracy"] > 0.9
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert len(result.history) == 6
    assert result.summary["samples_per_second"] > 0
    parts = [result.summary[f"{part}_seconds"] for part in ("data", "forward", "backward", "optimizer")]
    assert 0 < sum(parts) <= result.summary["step_seconds"] * 3
    assert result.summary["peak_memory_bytes"] > 10_000_000
    assert "mfu" not in result.summary, "a CPU has no documented peak"
    events = [json.loads(line)["event"] for line in capfd.readouterr().out.splitlines()]
    assert events[0] == "train.setup"
    assert events.count("train.epoch") == events.count("train.validate") == 6


def test_the_loop_of_the_source(tmp_path: Path) -> None:
    """setup_training, train_epoch, validate_epoch as the source document has them."""
    manager = a_manager(tmp_path)
    model, train_loader, val_loader = manager.setup_training(
        a_model(), a_dataset(), val_dataset=a_dataset(10), loss_fn=cross_entropy
    )
    assert val_loader is not None
    assert isinstance(model, nn.Module)
    for epoch in range(2):
        train_metrics = manager.train_epoch(train_loader, epoch)
        val_metrics = manager.validate_epoch(val_loader)
        assert train_metrics["loss"] > 0 < val_metrics["loss"]
    assert manager.progress.step == 16
    manager.close()
    manager.close()


def test_accumulation_equals_the_large_batch(tmp_path: Path) -> None:
    models = []
    for folder, settings in (
        ("large", {"batch_size": 32}),
        ("small", {"batch_size": 8, "gradient_accumulation_steps": 4}),
    ):
        with a_manager(tmp_path / folder, shuffle=False, **settings) as manager:
            models.append(a_model())
            manager.setup_training(models[-1], a_dataset(), loss_fn=cross_entropy, optimizer=sgd)
            assert manager.fit(3).summary["steps"] == 6
    for large, small in zip(weights(models[0]), weights(models[1]), strict=True):
        torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-6)


def test_a_global_batch_size_sets_the_accumulation(tmp_path: Path) -> None:
    with a_manager(tmp_path, batch_size=8, global_batch_size=32) as manager:
        assert manager.trainer.accumulate == 4


def test_clipping_bounds_the_step(tmp_path: Path) -> None:
    """With plain SGD and lr 1, the weights move by exactly the clipped gradient."""
    with a_manager(tmp_path, max_grad_norm=0.01) as manager:
        model = a_model()
        before = weights(model)
        manager.setup_training(
            model, a_dataset(8), loss_fn=cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)
        )
        manager.fit(1)
    moved = torch.cat([(a - b).flatten() for a, b in zip(weights(model), before, strict=True)]).norm()
    assert moved.item() == pytest.approx(0.01, rel=1e-4)


def test_a_scheduler_steps_once_per_update(tmp_path: Path) -> None:
    with a_manager(tmp_path, gradient_accumulation_steps=2) as manager:
        manager.setup_training(
            a_model(),
            a_dataset(),
            loss_fn=cross_entropy,
            optimizer=sgd,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        )
        manager.fit(1)
        assert manager.trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)


class LanguageModel(nn.Module):
    """A model that takes tokens by name and returns its own loss, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 32)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.arange(index, index + 5) % 32
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def test_a_model_that_returns_its_loss_is_trained_as_it_is(tmp_path: Path) -> None:
    with a_manager(tmp_path) as manager:
        manager.setup_training(LanguageModel(), Tokens())
        result = manager.fit(3)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert manager.progress.tokens == 3 * 32 * 4
    assert result.summary["tokens_per_second"] > 0


# Wrong models, wrong data


def test_a_model_without_a_loss_says_what_to_pass(tmp_path: Path) -> None:
    manager = a_manager(tmp_path)
    dataset = [{"input_ids": torch.zeros(4, dtype=torch.long)} for _ in range(8)]
    manager.setup_training(LanguageModel(), dataset)
    with pytest.raises(ModelOutputError, match="pass loss_fn"):
        manager.fit(1)


@pytest.mark.parametrize(
    ("loss_fn", "word"),
    [(lambda outputs, targets: 1.0, "float, not a tensor"), (lambda outputs, targets: outputs, "with .mean()")],
)
def test_a_loss_function_that_gives_no_number(tmp_path: Path, loss_fn: Any, word: str) -> None:
    manager = a_manager(tmp_path)
    manager.setup_training(a_model(), a_dataset(), loss_fn=loss_fn)
    with pytest.raises(ModelOutputError, match=word):
        manager.fit(1)


def test_a_model_with_nothing_to_train(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        a_manager(tmp_path).setup_training(a_model().requires_grad_(requires_grad=False), a_dataset())


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the model's"):
        a_manager(tmp_path).setup_training(a_model(), a_dataset(), optimizer=sgd(a_model().parameters()))


def test_a_scheduler_of_another_optimizer(tmp_path: Path) -> None:
    model = a_model()
    scheduler = torch.optim.lr_scheduler.ConstantLR(sgd(model.parameters()))
    with pytest.raises(ConfigError, match="another optimizer"):
        a_manager(tmp_path).setup_training(model, a_dataset(), optimizer=sgd(model.parameters()), scheduler=scheduler)


class Broken(Dataset[Any]):
    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise OSError(f"image-{index}.png is truncated")
        return torch.zeros(8), torch.tensor(0)


@pytest.mark.parametrize(
    ("dataset", "word"),
    [
        (TensorDataset(torch.zeros(0, 8), torch.zeros(0)), "empty"),
        (a_dataset(5), "5 samples, and one optimizer step takes 8"),
        (Broken(9), "reading batch 1 of epoch 0 failed: OSError: image-9.png is truncated"),
        ([object()] * 16, "reading batch 0"),
        (["text"] * 16, "holds no tensor"),
        (3, "is not a dataset"),
        ([torch.zeros(8)] * 8, "neither (inputs, targets) nor a mapping"),
    ],
)
def test_bad_data_is_one_clear_error(tmp_path: Path, dataset: Any, word: str) -> None:
    manager = a_manager(tmp_path, shuffle=False)

    def train() -> None:
        manager.setup_training(a_model(), dataset, loss_fn=cross_entropy)
        manager.fit(1)

    with pytest.raises(DataError) as caught:
        train()
    assert word in str(caught.value)


def test_using_it_before_set_up(tmp_path: Path) -> None:
    manager = a_manager(tmp_path)
    for use in (lambda: manager.fit(1), lambda: manager.train_step(None), manager.summary):
        with pytest.raises(RuntimeError, match="call setup_training"):
            use()
    with pytest.raises(RuntimeError, match="call setup_training"):
        manager.fault_tolerance.handle_error(ValueError("x"))


# Values that are not finite


class Poisoned(Dataset[Any]):
    """A dataset with NaN in the samples of the range `bad`."""

    def __init__(self, bad: range) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.full((8,), float("nan") if index in self.bad else index / 64)
        return inputs, torch.tensor(index % 3)


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}])
def test_a_bad_batch_is_skipped_and_counted(tmp_path: Path, settings: dict[str, Any]) -> None:
    with a_manager(tmp_path, shuffle=False, **settings) as manager:
        model = a_model()
        manager.setup_training(model, Poisoned(range(8, 16)), loss_fn=cross_entropy, optimizer=sgd)
        result = manager.fit(1)
    assert manager.trainer.guard.skipped == 1
    assert result.summary["skipped_steps"] == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert result.history[0]["loss"] == pytest.approx(result.history[0]["loss"]), "the mean leaves the bad step out"


def test_a_loss_that_stays_bad_stops_training_with_a_report(tmp_path: Path) -> None:
    manager = a_manager(tmp_path, shuffle=False, max_nonfinite_steps=2)
    model = a_model()
    manager.setup_training(model, Poisoned(range(8, 64)), loss_fn=cross_entropy, optimizer=sgd)
    with pytest.raises(NonFiniteLossError) as caught:
        manager.fit(1)
    text = str(caught.value)
    assert "in 3 steps in a row, up to step 4" in text
    assert "samples [0, 1, 2, 3, 4, 5, 6, 7] of a batch hold NaN" in text
    assert "lower the learning rate" in text
    assert all(parameter.isfinite().all() for parameter in model.parameters())


# Memory


class Hungry(nn.Module):
    """A model that runs out of memory for more than `limit` samples at once, as a device would."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.inner = a_model()
        self.limit = limit
        self.sizes: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.sizes.append(len(inputs))
        if len(inputs) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        result: Tensor = self.inner(inputs)
        return result


def test_out_of_memory_names_sizes_and_remedies(tmp_path: Path) -> None:
    manager = a_manager(tmp_path, batch_size=16)
    manager.setup_training(Hungry(4), a_dataset(), loss_fn=cross_entropy)
    with pytest.raises(OutOfMemoryError) as caught:
        manager.fit(1)
    text = str(caught.value)
    assert "batch_size: 8, gradient_accumulation_steps: 2" in text
    assert "oom_retry: true" in text
    assert "use_gradient_checkpointing: true" in text
    assert "Tried to allocate 20.00 MiB" in text
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_oom_retry_halves_until_it_fits_with_the_same_result(tmp_path: Path) -> None:
    trained = []
    for folder, limit in (("small", 4), ("large", 100)):
        with a_manager(tmp_path / folder, batch_size=16, shuffle=False, oom_retry=True) as manager:
            model = Hungry(limit)
            manager.setup_training(model, a_dataset(), loss_fn=cross_entropy, optimizer=sgd)
            manager.fit(1)
            trained.append(model)
    assert trained[0].sizes[:4] == [16, 8, 4, 4]
    assert set(trained[0].sizes[2:]) == {4}, "what was learned about memory is kept"
    for small, large in zip(weights(trained[0]), weights(trained[1]), strict=True):
        torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-6)


def test_oom_retry_gives_up_at_one_sample(tmp_path: Path) -> None:
    manager = a_manager(tmp_path, batch_size=4, oom_retry=True)
    manager.setup_training(Hungry(0), a_dataset(), loss_fn=cross_entropy)
    with pytest.raises(OutOfMemoryError):
        manager.fit(1)
    assert manager.trainer.pieces == 4


def test_a_loop_of_ones_own_can_recover(tmp_path: Path) -> None:
    manager = a_manager(tmp_path, oom_retry=True)
    _, loader, _ = manager.setup_training(Hungry(4), a_dataset(16), loss_fn=cross_entropy)
    recoveries = []
    for batch in loader:
        while True:
            try:
                result = manager.train_step(batch)
                break
            except Exception as error:
                recoveries.append(manager.fault_tolerance.handle_error(error))
        assert result.updated
    assert recoveries == [Recovery.RETRY]
    assert manager.progress.step == 2
    with pytest.raises(ZeroDivisionError):
        manager.fault_tolerance.handle_error(ZeroDivisionError())
    with pytest.raises(DataError):
        manager.fault_tolerance.handle_error(DataError("bad"))


def test_a_loop_of_ones_own_counts_every_accumulated_batch(tmp_path: Path) -> None:
    manager = a_manager(tmp_path, batch_size=4, gradient_accumulation_steps=4)
    _, loader, _ = manager.setup_training(a_model(), a_dataset(32), loss_fn=cross_entropy)
    for batch in loader:
        manager.train_step(batch)
    assert (manager.progress.step, manager.progress.samples) == (2, 32)
    assert manager.metrics is not None
    assert manager.metrics.samples == 32
    assert manager.summary()["samples_per_second"] == pytest.approx(16 / manager.summary()["step_seconds"])


def test_what_is_saved_is_told_with_an_error(tmp_path: Path) -> None:
    manager = a_manager(tmp_path, checkpoint_frequency=1)
    manager.setup_training(a_model(), a_dataset(8), loss_fn=cross_entropy)
    manager.fit(1)
    with pytest.raises(ZeroDivisionError) as caught:
        manager.fault_tolerance.handle_error(ZeroDivisionError())
    assert caught.value.__notes__ == ["step 1 is saved: the same command continues from there"]


# Resuming


def run_to(
    directory: Path, epochs: int, stop_at: int | None = None, **settings: Any
) -> tuple[nn.Module, MultiGPUTrainingManager]:
    """Train; SIGTERM comes while the batch of step `stop_at` is read."""
    manager = a_manager(directory, **settings)
    model = a_model(dropout=0.5)
    dataset = settings_dataset = Terminating(a_dataset(), manager, stop_at)
    manager.setup_training(model, settings_dataset, a_dataset(8), loss_fn=cross_entropy, optimizer=sgd)
    assert dataset is not None
    try:
        manager.fit(epochs)
    finally:
        manager.close()
    return model, manager


class Terminating(Dataset[Any]):
    def __init__(self, dataset: TensorDataset, manager: MultiGPUTrainingManager, stop_at: int | None) -> None:
        self.dataset, self.manager, self.stop_at = dataset, manager, stop_at

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if self.stop_at is not None and self.manager.progress.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.dataset[index]


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    """Reset SIGTERM to its state in a new process, and restore it afterwards."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("default_sigterm")
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("stop_at", [1, 3])
def test_stopped_in_an_epoch_and_gone_on_is_as_if_never_stopped(
    tmp_path: Path, settings: dict[str, Any], stop_at: int
) -> None:
    """Weights, dropout's random numbers and the history are bit-identical."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    whole, undisturbed = run_to(tmp_path / "whole", 3, **settings)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(StopTraining) as caught:
        run_to(tmp_path / "parts", 3, stop_at, **settings)
    assert caught.value.code == 143
    assert caught.value.step == stop_at + 1
    resumed, manager = run_to(tmp_path / "parts", 3, **settings)
    assert equal(weights(resumed), weights(whole))
    for mine, theirs in zip(manager.progress.history, undisturbed.progress.history, strict=True):
        for name in ("epoch", "loss", "val_loss"):
            assert mine[name] == theirs[name]


def test_a_setting_without_effect_is_told_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(a_dataset(), batch_size=8)
    with MultiGPUTrainingManager(MultiGPUConfig(batch_size=4, sync_bn=True), ctx=a_context(tmp_path)) as manager:
        manager.setup_training(a_model(), loader, loss_fn=cross_entropy, optimizer=sgd)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = {one["setting"]: one["advice"] for one in said if one["event"] == "train.no_effect"}
    assert told.keys() == {"batch_size", "sync_bn"}
    assert told["batch_size"].startswith("batch_size has no effect with a loader of your own: ")


def test_a_finished_run_is_not_repeated_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, first = run_to(tmp_path, 2)
    assert "nothing_left" not in capsys.readouterr().out
    model, again = run_to(tmp_path, 2)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()][-1]
    assert (said["event"], said["step"]) == ("train.nothing_left", 16)
    assert "ORCH_CHECKPOINT_DIR" in said["advice"]
    assert again.progress.step == first.progress.step == 16
    assert again.progress.history == first.progress.history
    _, longer = run_to(tmp_path, 3)
    assert longer.progress.step == 24
    assert isinstance(model, nn.Module)


def test_earlier_epochs_give_what_they_gave(tmp_path: Path) -> None:
    _, first = run_to(tmp_path, 2)
    manager = a_manager(tmp_path)
    _, train, validate = manager.setup_training(
        a_model(dropout=0.5), a_dataset(), a_dataset(8), loss_fn=cross_entropy, optimizer=sgd
    )
    assert validate is not None
    losses = [
        (manager.train_epoch(train, epoch)["loss"], manager.validate_epoch(validate)["loss"]) for epoch in range(2)
    ]
    assert losses == [(entry["loss"], entry["val_loss"]) for entry in first.progress.history]


def test_without_fault_tolerance_nothing_is_saved(tmp_path: Path) -> None:
    run_to(tmp_path / "none", 1, enable_fault_tolerance=False)
    assert not (tmp_path / "none").exists()


def test_checkpoints_come_as_often_as_asked(tmp_path: Path) -> None:
    run_to(tmp_path, 1, checkpoint_frequency=4)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000000004-a1", "step-000000000008-a1"]


@pytest.mark.parametrize("change", ["model", "foreign", "mode"])
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, change: str) -> None:
    ctx = a_context(tmp_path)
    if change == "foreign":
        ctx.save({"weights": [1.0]}, step=3)
        word = "not written by this training system"
    else:
        run_to(tmp_path, 1)
        word = "does not fit this model"
    if change == "mode":
        manager = a_manager(tmp_path)
        manager.trainer.shards_parameters = True
        word = "training_mode distributed_data_parallel"
        sized: nn.Module = a_model(dropout=0.5)
    else:
        manager, sized = a_manager(tmp_path), nn.Linear(8, 3)
    with pytest.raises(ConfigError, match=word):
        manager.setup_training(sized, a_dataset(), loss_fn=cross_entropy, optimizer=sgd)


class Stream(IterableDataset[Any]):
    """A dataset without a length that has a position to save."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at < 64:
            self.at += 1
            generator = torch.Generator().manual_seed(self.at)
            yield torch.randn(8, generator=generator), torch.tensor(self.at % 3)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def own_loader() -> DataLoader[Any]:
    return DataLoader(a_dataset(), batch_size=8, shuffle=True)


@pytest.mark.usefixtures("default_sigterm")
@pytest.mark.parametrize("make", [Stream, own_loader])
def test_streams_and_loaders_of_ones_own_go_on_in_the_middle(tmp_path: Path, make: Any) -> None:
    def run(folder: str, stop_at: int | None) -> nn.Module:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        manager = a_manager(tmp_path / folder, seed=5)
        model = a_model(dropout=0.5)

        def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
            if manager.progress.step == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return cross_entropy(outputs, targets)

        torch.manual_seed(11)
        manager.setup_training(model, make(), loss_fn=loss_fn, optimizer=sgd)
        manager.fit(2)
        return model

    whole = run("whole", None)
    with pytest.raises(StopTraining):
        run("parts", 11)
    assert equal(weights(run("parts", None)), weights(whole))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_their_random_numbers_change_nothing(tmp_path: Path, workers: int) -> None:
    """Samples that augment themselves come out alike in every run of a seed, in whatever process."""
    runs = []
    for folder in ("a", "b"):
        with a_manager(tmp_path / f"{folder}{workers}", num_workers=workers) as manager:
            model = a_model()
            manager.setup_training(model, Augmented(), loss_fn=cross_entropy, optimizer=sgd)
            manager.fit(2)
            runs.append(weights(model))
    assert equal(*runs)


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((8,), index / 32) + torch.randn(8), torch.tensor(index % 3)


# The summary of several runs
