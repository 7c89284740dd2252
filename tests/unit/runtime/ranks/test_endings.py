"""Notes of a keeper become typed facts; values that do not fit are unknown."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.codec import usable
from orchestrator.core.states import StopScope
from orchestrator.runtime.ranks.exit_evidence import SHUTDOWN_SECONDS, StopFacts, stop_facts
from orchestrator.runtime.spawn.client import Ending
from orchestrator.train.script.progress_reading import ProgressSnapshot


def facts_of(ending: Ending, printed: ProgressSnapshot | None = None) -> StopFacts:
    """Return the facts about the stop of a rank that ended at 8.0 by itself."""
    return stop_facts(ending, printed, ended_at=8.0, killed=False)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (Ending(), StopFacts()),
        (Ending(last_step=3, total_steps=9), StopFacts(last_step=3, total_steps=9)),
        (Ending(stop_seen_at=5.0), StopFacts(stop_seen_at=5.0, stop_scope=StopScope.RANK)),
        (Ending(keeper_terminated_at=4.0), StopFacts(stop_seen_at=4.0, stop_scope=StopScope.MACHINE)),
        (
            Ending(stop_seen_at=5.0, keeper_terminated_at=6.0),
            StopFacts(stop_seen_at=5.0, stop_scope=StopScope.MACHINE),
        ),
    ],
)
def test_a_keeper_is_told_only_when_its_whole_node_is(ending: Ending, expected: StopFacts) -> None:
    assert facts_of(ending) == expected


def test_printed_steps_stand_for_those_that_a_rank_did_not_report() -> None:
    printed = ProgressSnapshot(step=7, max_step=8, total_steps=9)
    assert facts_of(Ending(), printed) == StopFacts(last_step=8, total_steps=9)
    assert facts_of(Ending(last_step=3), printed) == StopFacts(last_step=3)


@pytest.mark.parametrize("wrong", ["5", [5], {}, True, float("nan"), float("inf"), -1, 2**70, object()])
def test_what_does_not_fit_is_unknown(wrong: Any) -> None:
    names = ("last_step", "total_steps", "stop_seen_at", "keeper_terminated_at")
    ending, unusable = usable(Ending, dict.fromkeys(names, wrong))
    assert (set(unusable), facts_of(ending)) == (set(names), StopFacts())


@pytest.mark.parametrize("wrong", [1e11 + 1, 1e300, 10**400])
def test_a_time_that_no_record_can_hold_is_unknown(wrong: Any) -> None:
    assert usable(Ending, {"stop_seen_at": wrong, "last_step": 3})[0] == Ending(last_step=3)


def test_a_rank_that_was_killed_has_not_left_because_its_keeper_was_terminated() -> None:
    """Otherwise the job would wait for the others as long as a stop may take, though no request has reached them."""
    terminated = Ending(keeper_terminated_at=7.0)
    assert stop_facts(terminated, ended_at=8.0, killed=True) == StopFacts()
    seen = Ending(stop_seen_at=7.5, keeper_terminated_at=7.0)
    assert stop_facts(seen, ended_at=8.0, killed=True).stop_scope is StopScope.MACHINE


def test_a_keeper_that_was_terminated_long_ago_explains_nothing() -> None:
    terminated = Ending(keeper_terminated_at=7.0)
    assert stop_facts(terminated, ended_at=7.0 + SHUTDOWN_SECONDS, killed=False).stop_scope is StopScope.MACHINE
    assert stop_facts(terminated, ended_at=8.0 + SHUTDOWN_SECONDS, killed=False) == StopFacts()
