"""The polling rate of a persister: low where nothing is saved, high just after a write."""

from __future__ import annotations

from itertools import accumulate

from orchestrator.checkpoint.repository.pace import LOOK_SECONDS, SOON_SECONDS, UNUSED_LOOK_SECONDS, next_pause


def pauses(first: float, count: int, *, used: bool) -> list[float]:
    return list(accumulate(range(count), lambda pause, _: next_pause(pause, busy=False, used=used), initial=first))


def test_after_a_write_looks_come_soon_and_then_twice_as_long_apart() -> None:
    assert next_pause(LOOK_SECONDS, busy=True, used=True) == SOON_SECONDS
    assert pauses(SOON_SECONDS, 20, used=True)[:3] == [SOON_SECONDS, 2 * SOON_SECONDS, 4 * SOON_SECONDS]
    assert pauses(SOON_SECONDS, 20, used=True)[-1] == LOOK_SECONDS


def test_where_nothing_is_saved_looks_become_seldom_but_not_at_once() -> None:
    unused = pauses(LOOK_SECONDS, 100, used=False)
    assert unused[-1] == UNUSED_LOOK_SECONDS
    assert sum(pause for pause in unused if pause < UNUSED_LOOK_SECONDS) > 10.0, "a script saves in its first seconds"


def test_the_first_snapshot_makes_looks_frequent_again() -> None:
    assert next_pause(UNUSED_LOOK_SECONDS, busy=False, used=True) == LOOK_SECONDS
