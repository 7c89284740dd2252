"""A short campaign; a campaign finds, repeats and shortens failing histories."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.simulation import campaign
from tests.simulation.__main__ import main
from tests.simulation.acts import ACTS, Act
from tests.simulation.history import History, Step
from tests.simulation.results import Part, Results

if TYPE_CHECKING:
    import random

    from tests.simulation.world import World

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


def test_a_failing_history_is_shortened_to_the_steps_that_it_takes() -> None:
    def break_the_record(world: World, dice: random.Random) -> str:
        assert not world.jobs, f"{len(world.jobs)} jobs of the planted defect"
        return ""

    acts = {**ACTS, "planted defect": Act(break_the_record, 1)}
    steps = campaign.history_of(4, length=30).steps
    outcome = campaign.run_history(History(4, (*steps, Step("planted defect", 1))), acts=acts)
    assert "planted defect" in outcome.failure
    shortest = campaign.shrink(outcome, acts=acts)
    assert [step.act for step in shortest.history.steps] == ["submit", "planted defect"]


def test_the_command_line_tells_what_has_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--first", "7", "--faults", "1", "--chunk", "1"]) == 0
    assert "seeds 7 to 7: histories: 1," in capsys.readouterr().out
    assert main(["replay", "7", "--keep", "1,2,3"]) == 0
    assert "every invariant held" in capsys.readouterr().out


def test_a_campaign_goes_on_where_its_results_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    noted = ["--chunk", "2", "--results", str(file)]
    assert main(["run", "--faults", "1", *noted]) == 0
    first = json.loads(file.read_text())
    assert (first["histories"], first["failed"], first["parts"][0]["first"]) == (2, 0, 0)
    assert main(["run", "--faults", str(first["faults"] + 1), *noted]) == 0
    whole = json.loads(file.read_text())
    assert [(part["first"], part["histories"]) for part in whole["parts"]] == [(0, 2), (2, 2)]
    assert whole["parts"][0] == first["parts"][0]
    assert whole["faults"] == sum(whole["kinds"].values()) == sum(sum(p["faults"].values()) for p in whole["parts"])
    capsys.readouterr()
    assert main(["run", "--faults", "1", *noted]) == 0
    assert f"has {whole['faults']} faults already" in capsys.readouterr().out
    assert json.loads(file.read_text()) == whole


def test_a_history_that_fails_stays_in_the_results(tmp_path: Path) -> None:
    part, results = Part.begin(5), Results(tmp_path / "results.json")
    failed = campaign.Outcome(campaign.history_of(5), "AssertionError: planted", "", Counter({"restart": 2}))
    part.add(campaign.Report(histories=1, steps=3, faults=Counter({"restart": 2}), failed=[failed]))
    results.parts.append(part)
    results.write()
    again = Results(tmp_path / "results.json")
    assert again.parts == [part]
    assert (again.next_seed, again.parts[0].failed) == (6, {"5": "AssertionError: planted"})


def test_several_processes_run_the_same_histories_in_their_order() -> None:
    alone, together = list[campaign.Report](), list[campaign.Report]()
    for processes, found in ((1, alone), (2, together)):
        campaign.run(0, faults=_faults(0, 1) + 1, processes=processes, chunk=2, on_chunk=found.append)
    assert [(each.histories, each.steps, each.faults) for each in together] == [
        (each.histories, each.steps, each.faults) for each in alone
    ]
    assert len(alone) == 2


def _faults(*seeds: int) -> int:
    return campaign.run_seeds(seeds).faults.total()


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--faults", "0"],
        ["run", "--processes", "0"],
        ["replay", "7", "--keep", "0"],
        ["replay", "7", "--keep", "999"],
    ],
)
def test_numbers_out_of_range_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "expected" in capsys.readouterr().err


def test_histories_that_are_broken_off_leave_nothing(tmp_path: Path) -> None:
    """The processes are killed during the histories that were begun beyond the requested number of faults."""
    campaign.run(0, faults=1, processes=2, chunk=2, homes=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
