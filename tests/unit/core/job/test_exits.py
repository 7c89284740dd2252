"""The ends of an attempt's ranks: an immutable sequence, extended in the same time whatever its length."""

from __future__ import annotations

from orchestrator.core.events import Exit
from orchestrator.core.job.record import Exits
from tests.support.records import replace


def end_of(rank: int) -> Exit:
    return Exit(rank=rank, exit_code=0, signal=None, at=1.0)


def test_a_rank_ends_once() -> None:
    again = replace(end_of(1), exit_code=4)
    assert Exits([end_of(1), end_of(2), again]) == (end_of(1), end_of(2))
