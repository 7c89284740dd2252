"""Two real ranks with measured shares take the steps of one process with the whole batch, also across a restart."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.train.script.elastic import share_out
from orchestrator.train.trainer.data.loading import ShareSampler
from tests.integration.trainer_ranks import global_batches, linear_model, run, trained_alone

pytestmark = pytest.mark.rare

STEPS = 20


def trained(place: Path, name: str, *, break_off: int = -1) -> list[dict[str, Any]]:
    """Start the script, or start it again; return what each rank found."""
    out, saved = place / name, str(place / "saved")
    for status, text, error in run("balanced.py", out, STEPS, break_off, cwd=place, ORCH_CHECKPOINT_DIR=saved):
        assert status == 0, text + error
    return [torch.load(f"{out}-rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return trained(tmp_path_factory.mktemp("balance"), "whole")


def test_a_rank_at_half_speed_gets_half_the_samples_from_the_first_checkpoint_on(whole: list[dict[str, Any]]) -> None:
    assert [one["begun_with"] for one in whole] == [[12, 12]] * 2
    assert [one["portions"] for one in whole] == [[16, 8]] * 2
    assert whole[0]["passes"] == [12] * 6 + [8] * 2 * (STEPS - 6), "16 samples are two passes of at most 12"
    assert whole[1]["passes"] == [12] * 6 + [8] * (STEPS - 6)
    assert {one["samples"] for one in whole} == {24 * STEPS}


def test_the_steps_are_those_of_the_plain_global_batch(whole: list[dict[str, Any]]) -> None:
    inputs, targets = global_batches(1, size=110)[0]
    sampler = ShareSampler(110, share_out(24, rank=0, world_size=1), shuffle=True, seed=7)
    batches = []
    for epoch in range(STEPS):
        sampler.seek(epoch)
        batches += [(inputs[indices], targets[indices]) for indices in sampler]
    expected = trained_alone(linear_model(), list(itertools.islice(batches, STEPS))).state_dict()
    for name, value in whole[0]["state"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(value, whole[1]["state"][name])


def test_a_restart_goes_on_with_the_shares_of_the_checkpoint_to_the_bit(
    whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    trained(tmp_path, "first", break_off=9)
    resumed = trained(tmp_path, "second")
    assert [one["begun_with"] for one in resumed] == [[16, 8]] * 2
    for name, value in whole[0]["state"].items():
        assert torch.equal(value, resumed[0]["state"][name]), name
