"""Times of a node with a wrong clock are converted to the daemon's; other times, and values that are no times, stay."""

from __future__ import annotations

import pytest

from orchestrator.core.events import Exit
from orchestrator.runtime.node_clock import AGREE_SECONDS, REPLIES, NodeClock, moved
from orchestrator.runtime.ranks.rank_events import RankEvent

NOW = 1_700_000_000.0


@pytest.mark.parametrize("ahead", [300.0, -300.0, AGREE_SECONDS + 1])
def test_a_clock_that_differs_is_known_from_one_reply(ahead: float) -> None:
    assert NodeClock().heard(NOW + ahead, NOW) == -ahead


def test_a_reply_that_was_long_underway_does_not_make_a_clock_wrong() -> None:
    clock = NodeClock()
    clock.heard(NOW, NOW + 0.1)
    assert clock.heard(NOW + 10, NOW + 40) == 0.0
    for _ in range(REPLIES):
        late = clock.heard(NOW + 100, NOW + 400)
    assert late == 300.0, "a clock that was set back is known after some replies"


def test_all_times_of_an_end_are_moved_and_nothing_else() -> None:
    end = Exit(rank=1, exit_code=1, signal=None, at=50.0, error_at=49.0, last_step=7)
    event = RankEvent(number=3, kind="exited", at=50.0, pid=9, exit=end)
    later = moved(event, 100.0)
    assert (later.number, later.pid, later.at) == (3, 9, 150.0)
    assert later.exit is not None
    assert (later.exit.at, later.exit.error_at, later.exit.stop_seen_at, later.exit.last_step) == (
        150.0,
        149.0,
        None,
        7,
    )
    assert moved(event, 0.0) is event
