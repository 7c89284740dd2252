"""Which nodes are avoided, and when they are looked at again."""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.core.diagnosis.quarantine import (
    CHECK_AFTER_SECONDS,
    ENOUGH,
    HALF_LIFE_SECONDS,
    LONGEST_CHECK_AFTER_SECONDS,
    Strike,
    avoid,
    check_after,
    condemned,
    strike_of,
    weight,
)
from orchestrator.core.ids import JobId
from orchestrator.core.scheduler.placement import free_on
from orchestrator.core.states import FailureClass
from tests.unit.core.builders import T0, after, exited, failed, failure, node, nodes, running


def strike(number: int = 0, *, code: str = "signal", at: float = T0) -> Strike:
    return Strike(node_id="a", at=at, job_id=JobId(f"job-{number:06d}"), code=code, sentence="rank 0 was killed")


def test_a_failure_of_the_place_strikes_the_node_of_the_rank_that_failed_first() -> None:
    job = running(nodes=("a", "b"))
    event = failed(job, failure=failure(code="gpu_ecc", rank=1))
    found = strike_of(after(job, exited(job, 1), event), event)
    assert found is not None
    assert (found.node_id, found.job_id, found.code) == ("b", job.id, "gpu_ecc")


@pytest.mark.parametrize(
    "blamed",
    [
        failure(FailureClass.USER, code="exception", rank=0),
        failure(code="peer_lost", rank=0),
        failure(code="retry_exit_code", rank=0),
        failure(code="signal", rank=None),
        failure(code="signal", rank=7),
    ],
    ids=["the script's own", "only followed", "asked for", "nobody's", "no such rank"],
)
def test_other_failures_strike_nobody(blamed: object) -> None:
    job = running()
    event = failed(job, failure=blamed)
    assert strike_of(after(job, event), event) is None
    assert strike_of(job, exited(job)) is None


def test_one_job_that_crashes_again_and_again_condemns_no_node_but_its_hardware_does() -> None:
    assert condemned([strike() for _ in range(50)], T0) == ""
    assert condemned([strike(code="gpu_xid") for _ in range(3)], T0).startswith("3 failures began here, the last: job-")
    assert condemned([strike(n) for n in range(3)], T0)
    assert condemned([strike(n) for n in range(2)], T0) == ""


def test_strikes_decay() -> None:
    three = [strike(n) for n in range(3)]
    assert weight(three, T0) == 3
    assert weight(three, T0 + HALF_LIFE_SECONDS) == 1.5
    assert condemned(three, T0 + HALF_LIFE_SECONDS) == ""
    assert weight(three, T0 - 5) == 3, "a clock that went back adds nothing"
    assert ENOUGH < 3


def test_the_last_place_is_never_avoided() -> None:
    two = nodes(node("a"), node("b"))
    assert avoid(two, {"a": "bad"}) == {"a": "bad"}
    assert avoid(two, {"a": "bad", "b": "bad"}) == {}
    assert avoid(nodes(node("a"), node("b", alive=False)), {"a": "bad"}) == {}
    assert avoid(nodes(node("a"), node("b", cordoned=True)), {"a": "bad"}) == {}
    assert avoid(two, {"gone": "bad"}) == {}


def test_nothing_is_placed_on_an_avoided_node() -> None:
    avoided = dataclasses.replace(node("a"), avoided="3 failures began here")
    assert set(free_on([avoided, node("b")], [])) == {"b"}


def test_a_node_that_fails_its_checks_is_looked_at_less_and_less_often() -> None:
    assert check_after(0) == CHECK_AFTER_SECONDS
    assert check_after(1) == 2 * CHECK_AFTER_SECONDS
    assert check_after(10_000) == LONGEST_CHECK_AFTER_SECONDS
