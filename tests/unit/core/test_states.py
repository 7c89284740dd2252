"""The transition table: every pair of states is either in it and allowed, or refused with the job's last events."""

from __future__ import annotations

import itertools

import pytest

from orchestrator.core.ids import ID_ALPHABET, job_id
from orchestrator.core.states import (
    IllegalTransitionError,
    JobState,
    StopPurpose,
    check_transition,
    mermaid,
)

S = JobState
LEGAL = {
    S.PENDING: {S.STARTING, S.SUSPENDED, S.CANCELLED, S.FAILED},
    S.STARTING: {S.RUNNING, S.RECOVERING, S.DRAINING, S.FAILED},
    S.RUNNING: {S.SUCCEEDED, S.FAILED, S.RECOVERING, S.DRAINING},
    S.RECOVERING: {S.STARTING, S.PENDING, S.DRAINING, S.FAILED},
    S.DRAINING: {S.PENDING, S.SUSPENDED, S.STARTING, S.RECOVERING, S.CANCELLED, S.FAILED, S.SUCCEEDED},
    S.SUSPENDED: {S.PENDING, S.CANCELLED},
    S.SUCCEEDED: set(),
    S.FAILED: set(),
    S.CANCELLED: set(),
}


def test_what_the_table_has_is_allowed_and_what_it_lacks_raises_with_the_story() -> None:
    for source, target in itertools.product(S, S):
        if target in LEGAL[source]:
            check_transition(source, target, ())
            continue
        with pytest.raises(IllegalTransitionError, match=f"{source} -> {target} is not.*one \\| two") as caught:
            check_transition(source, target, ("one", "two"))
        assert caught.value.story == ("one", "two")


def test_terminal_states_are_those_that_nothing_follows() -> None:
    assert {s for s in S if s.is_terminal} == {S.SUCCEEDED, S.FAILED, S.CANCELLED}


def test_only_states_with_an_attempt_may_hold_a_gang() -> None:
    assert {s for s in S if s.may_hold_gang} == {S.STARTING, S.RUNNING, S.RECOVERING, S.DRAINING}


def test_every_state_can_be_reached_and_every_state_leads_to_an_end() -> None:
    def reach(sources: set[JobState], step: dict[JobState, set[JobState]]) -> set[JobState]:
        found = set(sources)
        while new := set().union(*(step[s] for s in found)) - found:
            found |= new
        return found

    back = {s: {source for source in S if s in LEGAL[source]} for s in S}
    assert reach({S.PENDING}, LEGAL) == set(S)
    assert reach({s for s in S if s.is_terminal}, back) == set(S)


def test_the_diagram_shows_every_transition() -> None:
    text = mermaid()
    for source, targets in LEGAL.items():
        for target in targets:
            assert f"    {source} --> {target}" in text
    assert text.count(" --> ") == sum(map(len, LEGAL.values())) + 1 + 3


@pytest.mark.parametrize(
    ("new", "old", "overrides"),
    [
        (StopPurpose.CANCEL, StopPurpose.TIMEOUT, True),
        (StopPurpose.CANCEL, StopPurpose.PAUSE, True),
        (StopPurpose.PAUSE, StopPurpose.PREEMPT, True),
        (StopPurpose.PREEMPT, StopPurpose.PAUSE, False),
        (StopPurpose.PAUSE, StopPurpose.TIMEOUT, False),
        (StopPurpose.PAUSE, StopPurpose.PAUSE, False),
        *((other, StopPurpose.CANCEL, False) for other in StopPurpose),
    ],
)
def test_a_stronger_stop_overrides_a_weaker_one(new: StopPurpose, old: StopPurpose, overrides: bool) -> None:
    assert new.overrides(old) is overrides


def test_ids_carry_the_name_and_six_letters_that_can_be_read_aloud() -> None:
    made = job_id("digits", 31**6 - 1)
    assert made.startswith("digits-")
    assert len(made) == len("digits-") + 6
    assert set(made[len("digits-") :]) <= set(ID_ALPHABET)
    assert not set("01ilo") & set(ID_ALPHABET)
