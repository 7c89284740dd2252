"""Advice: a choice with its reason, or that none is certain; and the thresholds that it is compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.bench.advisor.advisor import AdvisorOutcome, probe_sizes, read_probe
from orchestrator.bench.advisor.cost_model import Calibration, Links, Probe, advice_json, advise, paying_batch, sentence
from orchestrator.bench.advisor.script_advice import advise_by_thresholds
from orchestrator.bench.plan import Cell
from orchestrator.cli.commands.bench import advice_lines, outcome_json
from orchestrator.cli.console import Console

MEASURED: dict[str, Any] = {
    "parameters": 2_000_000, "gradient_bytes": 8_000_000, "steps": 20, "seconds": 0.4,
    "points": [
        {"batch": 256, "steps": [0.257, 0.256, 0.256], "backwards": [0.16] * 3},
        {"batch": 1, "steps": [0.001, 0.001, 0.001], "backwards": [0.0006] * 3},
    ],
    "wrapped": [0.0012, 0.0012, 0.0012, 0.0012], "buckets": [[0.5, 1_000_000], [1.0, 7_000_000]],
}  # fmt: skip
PROBE = read_probe(MEASURED)
LINKS = Links(points=((1000, 0.001), (10_000_000, 0.011)))
CALIBRATION = Calibration(
    links={2: LINKS}, slowdowns={1: ((1000, 1.0),), 2: ((1000, 1.0),)}, waits={1: ((0.01, 0.0),), 2: ((0.01, 0.0),)}
)
CELLS = [Cell(batch=batch, ranks=ranks) for batch in (2, 16, 512) for ranks in (1, 2, 4)]


def test_a_probe_is_read_in_order() -> None:
    assert [point.batch for point in PROBE.points] == [1, 256]
    assert PROBE.wrapper == pytest.approx(0.0002)
    assert [bucket.bytes for bucket in PROBE.buckets] == [1_000_000, 7_000_000]


def test_the_largest_batch_is_probed_first_and_three_at_most() -> None:
    assert probe_sizes([Cell(batch=b, ranks=n) for b in (16, 64, 256) for n in (1, 2, 4)]) == (256, 4, 32)
    assert probe_sizes([Cell(batch=16, ranks=1)]) == (16,)


def test_more_ranks_pay_where_communication_is_small_beside_computation() -> None:
    small, middle, large = advise(CELLS, PROBE, CALIBRATION)
    assert (small.choice.cell.ranks, small.certain) == (1, True)
    assert (large.choice.cell.ranks, large.certain) == (2, True)
    assert not middle.certain
    assert [one.cell.ranks for one in small.predictions] == [1, 2]  # there is no data for 4 ranks


def test_a_sentence_gives_the_reason_or_says_that_it_cannot_tell() -> None:
    small, middle, large = (sentence(one, PROBE) for one in advise(CELLS, PROBE, CALIBRATION))
    assert small.startswith("global batch 2: 1 rank; 2 ranks save ")
    assert "for 8 MB of gradients" in small
    assert "I can't tell" in middle
    assert "`orch bench --batch-sizes 16`" in middle
    assert large.startswith("global batch 512: 2 ranks; 1.")
    assert "x one rank: reducing 8 MB of gradients adds" in large


def test_the_batch_from_which_more_ranks_pay() -> None:
    assert paying_batch(2, PROBE, CALIBRATION) == 32
    slow = replace(CALIBRATION, slowdowns={1: ((1000, 1.0),), 2: ((1000, 2.5),)})
    assert paying_batch(2, PROBE, slow) is None


def test_json_has_the_figures() -> None:
    found = advice_json(advise(CELLS, PROBE, CALIBRATION)[2], PROBE)
    assert (found["batch_size"], found["ranks"], found["certain"]) == (512, 2, True)
    several = found["predictions"][1]
    assert several["interval_95"][0] < several["samples_per_second"] < several["interval_95"][1]
    assert 0.5 < several["efficiency"] < 1


def outcome(probe: Probe = PROBE) -> AdvisorOutcome:
    advice = advise(CELLS, probe, CALIBRATION)
    return AdvisorOutcome(device="cuda", probe=probe, calibration=CALIBRATION, advice=advice, unknown=(8,))


def test_the_answer_names_what_it_cannot_know() -> None:
    lines = advice_lines(Console({"COLUMNS": "200"}), outcome())
    assert lines[0].split()[:2] == ["GLOBAL", "BATCH"]
    assert len(lines) == 1 + 6 + 3 + 1 + 1
    assert lines[-2] == "2 ranks: predicted to pay from a global batch of 32 on"
    assert lines[-1].startswith("8 ranks: I can't tell")
    found = outcome_json("medium", outcome())
    assert (found["unknown_ranks"], found["pays_from_batch_size"]) == ([8], {"2": 32})


@pytest.mark.parametrize(
    ("parameters", "batch", "several", "words"),
    [
        (54_403, 4096, False, "too small"),
        (2_021_379, 127, False, "a batch of 127 is too small"),
        (2_021_379, 128, None, "measure"),
        (5_000_000, 16, None, "between the thresholds"),
        (10_000_000, 63, False, "a batch of 63"),
        (10_000_000, 64, True, "gain from several"),
    ],
)
def test_thresholds(parameters: int, batch: int, several: bool | None, words: str) -> None:
    found = advise_by_thresholds(parameters, batch)
    assert found.several is several
    assert words in found.reason
