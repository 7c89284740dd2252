"""The examples of docs/training.md run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.train.script import training_context
from tests.unit.train.trainer.builders import a_dataset, a_manager, a_model, cross_entropy, sgd

BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (Path(__file__).parents[4] / "docs" / "training.md").read_text(), re.DOTALL | re.MULTILINE
)


@pytest.fixture(autouse=True)
def _fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORCH_DEVICE", "cpu")
    monkeypatch.setattr(training_context, "_current", None)


def test_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[0], {"__name__": "docs"})
    rate, accuracy = capsys.readouterr().out.splitlines()[-1].split()
    assert float(rate) > 0
    assert float(accuracy) > 0.8


@pytest.mark.parametrize("block", [1, 2])
def test_loops(tmp_path: Path, block: int) -> None:
    manager = a_manager(tmp_path / "checkpoints", checkpoint_frequency=3)
    names: dict[str, Any] = {
        "manager": manager,
        "model": a_model(),
        "dataset": a_dataset(),
        "val_dataset": a_dataset(8),
        "loss_fn": cross_entropy,
        "epochs": 2,
    }
    if block == 2:
        _, names["train_loader"], _ = manager.setup_training(
            a_model(), a_dataset(), loss_fn=cross_entropy, optimizer=sgd
        )
    exec(BLOCKS[block], names)
    assert manager.progress.step == (16 if block == 1 else 8)
    assert manager.fault_tolerance.saved_step in {6, 15}
