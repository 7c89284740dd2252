"""The checkpoints in a job's record."""

from __future__ import annotations

import pytest

from orchestrator.core.job.record import Checkpoints, Durable, Saved

STORED = Durable(step=10, at=5.0, path="/ckpt/10", digest="d")


def test_before_the_first_there_is_nothing() -> None:
    none = Checkpoints()
    assert (none.step, none.at, none.path, none.digest, none.durable_step, none.durable_at) == (
        0,
        None,
        "",
        "",
        0,
        None,
    )
    assert none.without_memory == none


def test_what_was_in_memory_alone_goes_with_the_actors() -> None:
    both = Checkpoints(newest=Saved(step=20, at=6.0), durable=STORED)
    assert (both.step, both.durable_step, both.path) == (20, 10, "/ckpt/10")
    assert both.without_memory == Checkpoints(newest=Saved(step=10, at=5.0), durable=STORED)
    assert Checkpoints(newest=Saved(step=20, at=6.0)).without_memory == Checkpoints()


def test_none_is_on_storage_alone() -> None:
    with pytest.raises(ValueError, match="newest"):
        Checkpoints(durable=STORED)
