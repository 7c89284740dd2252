"""Number of ranks for a script: the largest one with an efficiency of a half or more, and whether that is certain."""

from __future__ import annotations

import pytest

from orchestrator.bench.advisor.cost_model import Bucket, Calibration, Links, Probe, ProbePoint, predict
from orchestrator.bench.advisor.script_advice import ScriptAdvice, advise_script, script_json, script_sentence
from orchestrator.bench.plan import Cell


def advice(exposed: dict[int, float], unknown: tuple[int, ...] = ()) -> ScriptAdvice:
    """Return the advice for steps of 10 ms; ``exposed`` has the seconds of communication for each number of ranks."""
    probe = Probe(
        parameters=0,
        gradient_bytes=4_000_000,
        points=(ProbePoint(batch=1, step=0.01, backward=0.006, error=0.0),),
        wrapper=0.0,
        buckets=(Bucket(ready=1.0, bytes=4_000_000),),
        steps=20,
        seconds=0.2,
    )
    ranks = (1, *exposed)
    calibration = Calibration(
        links={n: Links(points=((4_000_000, seconds),)) for n, seconds in exposed.items()},
        slowdowns=dict.fromkeys(ranks, ((1, 1.0),)),
        waits=dict.fromkeys(ranks, ((0.01, 0.0),)),
    )
    predictions = tuple(predict(Cell(batch=n, ranks=n), probe, calibration) for n in ranks)
    return advise_script("cpu", probe, calibration, predictions, unknown)


def test_ranks_that_wait_little_are_all_worth_it() -> None:
    found = advice({2: 0.0, 8: 0.0005})
    assert (found.choice.cell.ranks, found.certain) == (8, True)
    assert found.efficiency(found.choice) == pytest.approx(10 / 10.5)
    assert script_sentence(found).startswith(
        "worth 8 ranks: on 8 ranks, reducing 4 MB of gradients adds 0.5 ms to 10 ms"
    )


def test_communication_beyond_the_computation_is_not_worth_it() -> None:
    found = advice({2: 0.05, 4: 0.2})
    assert (found.choice.cell.ranks, found.certain) == (1, True)
    assert script_sentence(found).startswith("worth 1 rank: on 4 ranks, reducing 4 MB of gradients adds 200 ms")


def test_close_to_the_limit_it_cannot_tell() -> None:
    found = advice({2: 0.0099})
    assert (found.choice.cell.ranks, found.certain) == (2, False)
    assert "I can't tell" in script_sentence(found)


def test_one_rank_alone_is_not_compared() -> None:
    found = advice({}, unknown=(2, 4))
    assert script_sentence(found) == "worth 1 rank: no other number of ranks could be measured"
    document = script_json(found)
    assert (document["ranks"], document["unknown_ranks"]) == (1, [2, 4])
    assert document["predictions"][0]["speed_up_interval_95"] is None
