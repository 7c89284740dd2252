"""One rank reports an error for all."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore

from orchestrator.train.errors import ConfigError
from orchestrator.train.trainer.loop.recovery import one_voice
from orchestrator.train.trainer.process_group import RankGroup
from tests.unit.train.trainer.builders import alone


def fail(place: RankGroup, error: Exception) -> None:
    with one_voice(place, under_orch=False):
        raise error


def test_a_rank_alone_raises_its_own_error() -> None:
    error = ConfigError("no such mode")
    with pytest.raises(ConfigError) as caught:
        fail(alone(), error)
    assert caught.value is error


def test_rank_0_raises_the_error_of_the_rank_that_ended_its_collective() -> None:
    store = HashStore()
    zero, one = (
        RankGroup(rank=rank, world_size=2, local_rank=rank, device=torch.device("cpu"), store=store) for rank in (0, 1)
    )
    with pytest.raises(ConfigError):
        fail(one, ConfigError("no such mode"))
    with pytest.raises(ConfigError, match="rank 1: no such mode"):
        fail(zero, RuntimeError("gloo: Connection closed by peer"))


def test_another_error_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        fail(alone(), RuntimeError("out of memory"))
