"""The training system on a real GPU: precisions, compilation, memory that recomputation saves, device decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from orchestrator.train.script.environment import RankEnvironment
from orchestrator.train.script.training_context import Context
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.loop.manager import FitResult, MultiGPUTrainingManager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a real GPU"),
    pytest.mark.filterwarnings(
        "ignore:.*torch.jit:DeprecationWarning"
    ),  # torch.compile imports parts of torch that use it
]

WIDTH, DEPTH, SAMPLES = 1024, 8, 8192


def deep_model(depth: int = DEPTH) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 10))


def data(*, bad: range = range(0)) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    targets = inputs[:, :10].argmax(dim=1)
    inputs[bad.start : bad.stop] = float("nan")
    return TensorDataset(inputs, targets)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float(), targets)


def train(
    directory: Path, *, steps: int = 40, depth: int = DEPTH, learning_rate: float = 1e-4, **settings: Any
) -> tuple[FitResult, Any]:
    ctx = Context(RankEnvironment(checkpoint_dir=str(directory), device="cuda:0"))
    config = MultiGPUConfig(batch_size=512, progress_bar=False, enable_fault_tolerance=False, **settings)
    torch.cuda.reset_peak_memory_stats()
    with MultiGPUTrainingManager(config, ctx=ctx) as manager:
        manager.setup_training(
            deep_model(depth),
            data(),
            loss_fn=loss_fn,
            optimizer=lambda ours: torch.optim.AdamW(ours, lr=learning_rate, fused=True),
        )
        return manager.fit(max_steps=steps), manager


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"compile": True}])
def test_it_learns_in_every_precision(tmp_path: Path, settings: dict[str, Any]) -> None:
    result, manager = train(tmp_path, steps=64, depth=2, learning_rate=1e-3, **settings)
    print([entry["loss"] for entry in result.history])
    assert result.history[-1]["loss"] < 0.7 * result.history[0]["loss"]
    parts = [result.summary[f"{part}_seconds"] for part in ("data", "forward", "backward", "optimizer")]
    assert all(seconds > 0 for seconds in parts)
    assert manager.trainer.guard.skipped == 0
    print(
        {
            "settings": settings,
            **{k: v for k, v in result.summary.items() if k in ("samples_per_second", "mfu", "peak_memory_bytes")},
        }
    )


def test_recomputation_saves_memory(tmp_path: Path) -> None:
    plain, _ = train(tmp_path / "plain", steps=5)
    del _  # it holds the first model
    less, _ = train(tmp_path / "less", steps=5, use_gradient_checkpointing=True)
    assert less.summary["peak_memory_bytes"] < plain.summary["peak_memory_bytes"]


@pytest.mark.parametrize("fused", [True, False])
def test_a_bad_batch_never_reaches_the_weights(tmp_path: Path, fused: bool) -> None:
    """With a fused optimizer the trainer does not wait for the device; without one it does."""
    ctx = Context(RankEnvironment(checkpoint_dir=str(tmp_path), device="cuda:0"))
    config = MultiGPUConfig(batch_size=512, progress_bar=False, shuffle=False, enable_fault_tolerance=False)
    with MultiGPUTrainingManager(config, ctx=ctx) as manager:
        model = deep_model()
        manager.setup_training(
            model,
            data(bad=range(512, 1024)),
            loss_fn=loss_fn,
            optimizer=lambda ours: torch.optim.AdamW(ours, lr=1e-4, fused=fused),
        )
        manager.fit(1)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert manager.trainer.guard.skipped == (0 if fused else 1), "where the device decides, the program need not know"


def test_mfu_of_a_known_gpu_is_a_share(tmp_path: Path) -> None:
    from orchestrator.train.trainer.measure.metrics import device_peak

    if device_peak(torch.device("cuda", 0), "bf16") is None:
        pytest.skip(f"no documented peak for {torch.cuda.get_device_name(0)}")
    result, _ = train(tmp_path, steps=60, precision="bf16")
    assert 0 < result.summary["mfu"] < 1
