"""The models: their true sizes, their data, and a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestrator.bench.rank.models import ModelError, make_workload, table_batch


@pytest.mark.parametrize(
    ("name", "parameters"), [("medium", 54_403), ("large", 2_021_379), ("conv", 94_986), ("transformer", 466_432)]
)
def test_a_model_has_its_true_number_of_parameters_and_can_be_trained(name: str, parameters: int) -> None:
    made = make_workload(name, 42)
    assert made.parameters == parameters
    inputs, targets = made.batch(4, torch.Generator().manual_seed(1))
    loss = made.loss(made.model(inputs), targets)
    loss.backward()
    assert torch.isfinite(loss)


def test_a_seed_gives_the_same_model_and_data() -> None:
    one, two = make_workload("medium", 7), make_workload("medium", 7)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    first, second = (table_batch(8, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_the_features_follow_from_each_other() -> None:
    features, targets = table_batch(4000, torch.Generator().manual_seed(42))
    assert (features.shape, targets.shape) == ((4000, 50), (4000, 3))
    correlations = torch.corrcoef(features[:, :4].T)
    assert correlations[0, 1] > 0.8
    assert correlations[0, 2] > 0.4
    assert abs(correlations[0, 3]) < 0.1


USER = """
import torch
from torch import nn
class Net(nn.Linear):
    pass
def plain():
    return Net(50, 3)
def whole():
    return nn.Linear(4, 1), lambda n, g: (torch.randn(n, 4, generator=g), torch.randn(n, 1, generator=g)), nn.functional.mse_loss
def nothing():
    return None
def frozen():
    return nn.ReLU()
def broken():
    raise RuntimeError("no weights here")
LIST = [1]
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(USER)
    return path


@pytest.mark.parametrize(("factory", "parameters"), [("plain", 153), ("whole", 5)])
def test_a_users_model(script: Path, factory: str, parameters: int) -> None:
    assert make_workload(f"{script}:{factory}", 1).parameters == parameters


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("absent", "has no function absent"),
        ("LIST", "has no function LIST"),
        ("nothing", "returned NoneType: return a module"),
        ("frozen", "no trainable parameters"),
        ("broken", "failed: RuntimeError: no weights here"),
    ],
)
def test_a_factory_that_makes_no_model_is_named(script: Path, factory: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make_workload(f"{script}:{factory}", 1)


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere.py not found"):
        make_workload(f"{tmp_path}/nowhere.py:make", 1)
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(ModelError, match="cannot be imported: ZeroDivisionError"):
        make_workload(f"{broken}:make", 1)
