"""The cost model: compute, slowdown, exposed communication, and an interval that widens with missing measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.bench.advisor.cost_model import (
    Bucket,
    Calibration,
    Crowding,
    Links,
    Probe,
    ProbePoint,
    exposed_seconds,
    interpolate,
    predict,
    slowdown_of,
)
from orchestrator.bench.plan import Cell

LINKS = Links(points=((1_000, 0.001), (1_001_000, 0.011)))
PROBE = Probe(
    parameters=250_000,
    gradient_bytes=1_000_000,
    points=(ProbePoint(batch=8, step=0.010, backward=0.006, error=0.0), ProbePoint(batch=64, step=0.066, backward=0.04, error=0.0)),
    wrapper=0.001,
    buckets=(Bucket(ready=1.0, bytes=1_000_000),),
    steps=20,
    seconds=0.5,
)  # fmt: skip
CALIBRATION = Calibration(
    links={2: LINKS}, slowdowns={1: ((1000, 1.0),), 2: ((1000, 1.2),)}, waits={1: ((0.01, 0.0),), 2: ((0.01, 0.0005),)}
)


@pytest.mark.parametrize(("at", "value"), [(8, 10.0), (36, 38.0), (64, 66.0), (120, 122.0), (0, 2.0), (-100, 0.0)])
def test_values_lie_on_lines_between_points_and_beyond(at: float, value: float) -> None:
    assert interpolate([(8, 10.0), (16, 18.0), (64, 66.0)], at) == pytest.approx(value)


def test_one_rank_computes_and_nothing_else() -> None:
    found = predict(Cell(batch=8, ranks=1), PROBE, CALIBRATION)
    assert found.throughput.value == pytest.approx(800)
    assert (found.communication, found.exposed) == (0.0, 0.0)


def test_several_ranks_are_slowed_down_and_wait() -> None:
    found = predict(Cell(batch=16, ranks=2), PROBE, CALIBRATION)
    assert found.compute == pytest.approx(1.2 * 0.011)
    assert found.communication == pytest.approx(LINKS.seconds(1_000_000))
    assert found.exposed == pytest.approx(found.communication + 0.0005)
    assert found.throughput.value == pytest.approx(16 / (found.compute + found.exposed))


@pytest.mark.parametrize(
    ("buckets", "hides", "exposed"),
    [
        ([(1.0, 1_001_000)], 1.0, 0.011),
        ([(0.5, 1_001_000)], 1.0, 0.001),
        ([(0.0, 1_001_000)], 1.0, 0.0),
        ([(0.5, 1_001_000), (1.0, 1_000)], 1.0, 0.002),
        ([(0.2, 1_001_000), (0.3, 1_001_000)], 1.0, 0.006),
        ([(0.5, 1_001_000)], 0.0, 0.011),
        ([(0.5, 1_001_000)], 0.5, 0.006),
    ],
)
def test_communication_hides_behind_the_backward_that_is_left(
    buckets: list[tuple[float, int]], hides: float, exposed: float
) -> None:
    made = [Bucket(ready=ready, bytes=size) for ready, size in buckets]
    assert exposed_seconds(made, 0.020, replace(LINKS, hides=hides)) == pytest.approx(exposed)


CROWDED = replace(PROBE, crowding=Crowding(ranks=4, factor=1.44, error=0.05))
SEVERAL = replace(CALIBRATION, slowdowns={1: ((1000, 1.0),), 2: ((1000, 1.1),), 4: ((1000, 1.21),)})


def test_the_model_s_own_slowdown_replaces_that_of_the_references() -> None:
    assert slowdown_of(4, CROWDED, SEVERAL) == pytest.approx((1.44, 0.05))
    assert slowdown_of(1, CROWDED, SEVERAL) == pytest.approx((1.0, 0.0))
    assert slowdown_of(4, PROBE, SEVERAL) == pytest.approx((1.21, 0.0))


def test_the_slowdown_lies_between_references_whose_distance_widens_the_interval() -> None:
    both = replace(CALIBRATION, slowdowns={1: ((1000, 1.0),), 2: ((10_000, 1.0), (100_000_000, 2.0))})
    small, middle, huge = (
        predict(Cell(batch=16, ranks=2), replace(PROBE, gradient_bytes=size), both) for size in (1, 1_000_000, 10**12)
    )
    assert small.compute == pytest.approx(0.011)
    assert middle.compute == pytest.approx(1.5 * 0.011)
    assert huge.compute == pytest.approx(2 * 0.011)
    agreeing = replace(CALIBRATION, slowdowns={1: ((1000, 1.0),), 2: ((1000, 1.5),)})
    assert middle.margin > predict(Cell(batch=16, ranks=2), PROBE, agreeing).margin


def test_what_was_not_probed_is_less_certain() -> None:
    inside, beyond = (predict(Cell(batch=batch, ranks=1), PROBE, CALIBRATION) for batch in (64, 65))
    assert (inside.extrapolated, beyond.extrapolated) == (False, True)
    assert beyond.margin == pytest.approx(2 * inside.margin)


def test_longer_steps_wait_longer_for_the_slowest_rank() -> None:
    waiting = replace(CALIBRATION, waits={1: ((0.01, 0.0),), 2: ((0.001, 0.0005), (0.01, 0.002))})
    short, long = (
        predict(Cell(batch=16, ranks=2), replace(PROBE, points=(ProbePoint(batch=8, step=step, backward=step / 2, error=0.0),)), waiting)
        for step in (0.004, 0.040)
    )  # fmt: skip
    expected = [interpolate(waiting.waits[2], 1.2 * (step + PROBE.wrapper)) for step in (0.004, 0.040)]
    assert [one.exposed - one.communication for one in (short, long)] == pytest.approx(expected)
