"""An unmodified Hugging Face model: batches by name, its own loss, its own switch for recomputation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from orchestrator.train.script.environment import RankEnvironment
from orchestrator.train.script.training_context import Context
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager

pytestmark = pytest.mark.rare

EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface" / "train.py"

pytest.importorskip("transformers", reason="pip install transformers to try Hugging Face's models")


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("huggingface_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("settings", [{}, {"use_gradient_checkpointing": True}, {"use_mixed_precision": True}])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_example_learns(tmp_path: Path, settings: dict[str, Any]) -> None:
    script = example()
    ctx = Context(RankEnvironment(checkpoint_dir=str(tmp_path), device="cpu"))
    config = MultiGPUConfig(batch_size=16, progress_bar=False, **settings)
    with MultiGPUTrainingManager(config, ctx=ctx) as manager:
        model = script.model()
        manager.setup_training(model, script.Lines(64))
        result = manager.fit(max_steps=20)
        assert model.is_gradient_checkpointing == settings.get("use_gradient_checkpointing", False)
    assert result.history[-1]["loss"] < 5.0, "a uniform guess costs 5.5"
    assert manager.progress.tokens == 20 * 16 * 64
