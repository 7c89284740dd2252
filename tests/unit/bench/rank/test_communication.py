"""The split of communication: the part that backward waits for, and the part before it."""

from __future__ import annotations

import pytest

from orchestrator.bench.rank.stepping import exposed_and_hidden


@pytest.mark.parametrize(
    ("buckets", "end", "exposed", "hidden"),
    [
        ([(3.0, 5.0)], 5.0, 2.0, 0.0),
        ([(1.0, 2.0), (3.0, 4.0)], 4.0, 1.0, 1.0),
        ([(1.0, 3.5), (3.0, 4.0)], 4.0, 1.0, 2.0),
        ([(1.0, 2.5), (2.0, 2.8), (4.0, 4.5)], 4.5, 0.5, 1.8),
        ([(2.0, 2.8), (1.0, 2.5), (4.0, 4.5)], 4.5, 0.5, 1.8),
        ([(1.0, 9.0), (2.0, 3.0), (4.0, 9.0)], 9.0, 5.0, 3.0),
        ([(1.0, 2.0)], 0.9, 0.0, 0.0),
    ],
)
def test_communication_is_counted_once(
    buckets: list[tuple[float, float]], end: float, exposed: float, hidden: float
) -> None:
    assert exposed_and_hidden(buckets, end) == pytest.approx((exposed, hidden))
