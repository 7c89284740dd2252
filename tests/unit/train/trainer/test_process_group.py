"""The place of a rank: the values of the configuration against those of the launcher."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from orchestrator.train.errors import ConfigError
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.process_group import RankGroup, _device, _log_environment

FOUND = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # so that values that the code sets are undone
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("settings", "local_rank", "expected"),
    [
        ({}, 1, FOUND),
        ({"device_ids": [3, 2]}, 0, torch.device("cuda", 3)),
        ({"device_ids": [3, 2]}, 1, torch.device("cuda", 2)),
        ({"device_ids": [3, 2], "training_mode": "data_parallel"}, 1, torch.device("cuda", 3)),
    ],
)
def test_device_ids_choose_the_gpu(settings: dict[str, Any], local_rank: int, expected: torch.device) -> None:
    assert _device(MultiGPUConfig(**settings), FOUND, local_rank) == expected


def test_ranks_of_the_configuration_are_told_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    _log_environment(MultiGPUConfig(rank=1, world_size=2, local_rank=1))
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["1", "2", "1"]


def test_a_launcher_that_says_something_else_is_believed_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="launcher says WORLD_SIZE=4"):
        _log_environment(MultiGPUConfig(rank=0, world_size=2))


def test_ranks_that_could_not_meet_are_told_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nothing says where rank 0 is"):
        _log_environment(MultiGPUConfig(rank=0, world_size=2))


def test_one_rank_alone_agrees_with_itself_without_a_process_group() -> None:
    alone = RankGroup(rank=0, world_size=1, local_rank=0, device=torch.device("cuda", 0))
    assert alone.control_device == torch.device("cpu")
