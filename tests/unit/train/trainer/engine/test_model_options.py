"""Options of a model: each one has its effect, and keeps parameters, names and results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.train.errors import ConfigError
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.engine.trainer import (
    DistributedDataParallelTrainer,
    MixedPrecision,
    find_blocks,
    prepare_model,
    recompute_activations,
    resolve,
)
from tests.unit.train.trainer.builders import a_model, alone, cross_entropy, sgd

CPU = torch.device("cpu")


class Deep(nn.Module):
    """Blocks in a list, each counting its forward passes."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return values


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 64)
        self.back = nn.Linear(64, 16)
        self.calls = 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.back(torch.relu(self.linear(values)))
        return result


def kept_bytes(model: nn.Module, inputs: Tensor) -> int:
    """Return the bytes that a forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs).sum().backward()
    return sum(kept.values()) - sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())


def test_recomputation_keeps_less_and_gives_the_same_gradient() -> None:
    torch.manual_seed(0)
    model, inputs = Deep(), torch.randn(256, 16)
    names = list(model.state_dict())
    plain_bytes = kept_bytes(model, inputs)
    plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    assert recompute_activations(model) == 4
    less_bytes = kept_bytes(model, inputs)
    assert less_bytes < 0.5 * plain_bytes
    assert all(block.calls == 3 for block in model.blocks), "once plain, twice with recomputation"
    for parameter, expected in zip(model.parameters(), plain, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected)
    assert list(model.state_dict()) == names


def test_blocks_are_found_in_lists_before_sequences() -> None:
    assert len(find_blocks(Deep(3))) == 3
    assert [type(block) for block in find_blocks(a_model())] == [nn.Linear, nn.Linear]
    assert find_blocks(nn.Linear(2, 2)) == []


def test_a_model_without_blocks_is_told_how_to_go_on() -> None:
    with pytest.raises(ConfigError, match=r"torch\.utils\.checkpoint"):
        prepare_model(nn.Linear(2, 2), MultiGPUConfig(use_gradient_checkpointing=True), alone())


def test_a_models_own_switch_is_used() -> None:
    class Own(nn.Linear):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
            self.given = gradient_checkpointing_kwargs

    model = Own(2, 2)
    recompute_activations(model)
    assert model.given == {"use_reentrant": False}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_precision_decides_what_a_product_is_computed_in(precision: Any, dtype: torch.dtype) -> None:
    mixed = MixedPrecision(MultiGPUConfig(precision=precision), CPU)
    with mixed.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert (mixed.scaler is not None) == (precision == "fp16")


def test_auto_is_bf16_on_a_cpu() -> None:
    assert resolve("auto", CPU) == "bf16"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_trains_like_fp32_within_its_tolerance(precision: Any) -> None:
    losses = {}
    for name in ("fp32", precision):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        trainer = DistributedDataParallelTrainer(MultiGPUConfig(precision=name, batch_size=32), alone())
        trainer.prepare(model, loss_fn=cross_entropy, optimizer=sgd)
        inputs = torch.randn(32, 16)
        targets = inputs.argmax(dim=1)
        losses[name] = [float(trainer.train_step((inputs, targets)).loss) for _ in range(40)]
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert losses[precision][-1] < 0.5 * losses[precision][0]
    for low, full in zip(losses[precision], losses["fp32"], strict=True):
        assert low == pytest.approx(full, rel=0.1, abs=0.05)
    assert losses[precision] != losses["fp32"]


def test_compile_runs_the_backend_it_is_told() -> None:
    """`eager` traces without generating code, which is quick and enough to see that compiling happens."""
    seen = []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return cross_entropy(outputs, targets)

    model = a_model()
    config = MultiGPUConfig(compile=True, compile_backend="eager")
    trainer = DistributedDataParallelTrainer(config, alone())
    names = list(model.state_dict())
    trainer.prepare(model, loss_fn=loss_fn, optimizer=sgd)
    assert model._compiled_call_impl is not None
    first = trainer.train_step((torch.randn(4, 8), torch.zeros(4, dtype=torch.long)))
    assert first.loss.isfinite()
    assert list(model.state_dict()) == names
    torch._dynamo.reset()


class Listening(nn.Linear):
    """A layer that records the settings of its compilation, and is not compiled."""

    def compile(self, *_: Any, **settings: Any) -> None:
        self.asked = settings


def test_compile_is_told_its_mode() -> None:
    for mode, expected in ((None, {}), ("max-autotune", {"mode": "max-autotune"})):
        model = Listening(8, 3)
        DistributedDataParallelTrainer(MultiGPUConfig(compile=True, compile_mode=mode), alone()).prepare(
            model, loss_fn=cross_entropy, optimizer=sgd
        )
        assert model.asked == {"backend": "inductor", **expected}
