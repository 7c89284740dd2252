"""A short campaign; a campaign finds, repeats and shortens failing histories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.simulation import campaign
from tests.simulation.acts import ACTS
from tests.simulation.results import Results

if TYPE_CHECKING:
    pass

SEEDS = 40


def test_every_invariant_holds_in_a_short_campaign() -> None:
    report = campaign.run_seeds(range(SEEDS))
    assert [f"seed {outcome.history.seed}: {outcome.failure}" for outcome in report.failed] == []
    assert report.histories == SEEDS
    assert set(report.faults) == {name for name, act in ACTS.items() if act.fault}, "a kind of fault never happened"


@pytest.mark.parametrize("seed", [1099, 1124, 1328])
def test_no_gpu_is_given_away_twice_where_ranks_share_some(seed: int) -> None:
    """An earlier version counted halves of different GPUs as a whole GPU."""
    assert campaign.run_history(campaign.history_of(seed)).failure == ""


def test_a_rank_that_has_ended_is_not_run_again_in_the_same_attempt() -> None:
    """The gang was lost with the head before its placement was recorded, and was created again."""
    assert campaign.run_history(campaign.history_of(1385)).failure == ""


def test_a_seed_gives_the_same_history_each_time() -> None:
    history = campaign.history_of(5, length=60)
    first, second = campaign.run_history(history, story=True), campaign.run_history(history, story=True)
    assert first.failure == ""
    assert (first.digest, first.story) == (second.digest, second.story)


def test_the_committed_results_are_whole_and_what_failed_in_them_does_no_more() -> None:
    results = Results(Path(__file__).parent / "results.json")
    assert results.faults.total() > 0
    at = 0
    for part in results.parts:
        assert part.first == at, "no seed is left out or run twice"
        at += part.histories
    failed = [int(seed) for part in results.parts for seed in part.failed]
    assert {seed: campaign.run_history(campaign.history_of(seed)).failure for seed in failed} == dict.fromkeys(
        failed, ""
    )
