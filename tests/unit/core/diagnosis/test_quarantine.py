"""Nodes that are quarantined, and the times of their next checks."""

from __future__ import annotations

import pytest

from orchestrator.core.diagnosis.quarantine import (
    CHECK_AFTER_SECONDS,
    ENOUGH,
    HALF_LIFE_SECONDS,
    LONGEST_CHECK_AFTER_SECONDS,
    Strike,
    check_after,
    condemned,
    quarantined,
    strike_of,
    weight,
)
from orchestrator.core.facts.codec import fact_from
from orchestrator.core.facts.faults import GpuFault, GpuLost, PythonException, RepeatedFailures, Xid
from orchestrator.core.ids import JobId
from orchestrator.core.scheduler.placement import free_on
from orchestrator.core.states import FailureClass
from tests.support.records import replace
from tests.unit.core.builders import T0, after, cause, changed, exited, failed, failure, node, nodes, running

BAD = fact_from("bad")


def strike(number: int = 0, *, code: str = "signal", at: float = T0) -> Strike:
    return Strike(node_id="a", at=at, job_id=JobId(f"job-{number:06d}"), cause=cause(code))


def test_a_failure_of_the_place_strikes_the_node_of_the_rank_that_failed_first() -> None:
    job = running(nodes=("a", "b"))
    event = failed(job, failure=failure(code="gpu_ecc", rank=1))
    found = strike_of(after(job, exited(job, 1), event), event)
    assert found is not None
    assert (found.node_id, found.job_id, found.cause.code) == ("b", job.id, "gpu_ecc")


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
    assert condemned([strike() for _ in range(50)], T0) is None
    assert condemned([strike(code="gpu_xid") for _ in range(3)], T0) == RepeatedFailures(
        failures=3, job_id="job-000000", cause=cause("gpu_xid")
    )
    assert condemned([strike(n) for n in range(3)], T0)
    assert condemned([strike(n) for n in range(2)], T0) is None


def test_strikes_decay() -> None:
    three = [strike(n) for n in range(3)]
    assert weight(three, T0) == 3
    assert weight(three, T0 + HALF_LIFE_SECONDS) == 1.5
    assert condemned(three, T0 + HALF_LIFE_SECONDS) is None
    assert weight(three, T0 - 5) == 3, "a clock that went back adds nothing"
    assert ENOUGH < 3


def test_the_last_place_is_never_avoided() -> None:
    two = nodes(node("a"), node("b"))
    assert quarantined(two, {"a": BAD}) == {"a": BAD}
    assert quarantined(two, {"a": BAD, "b": BAD}) == {}
    assert quarantined(nodes(node("a"), node("b", alive=False)), {"a": BAD}) == {}
    assert quarantined(nodes(node("a"), node("b", cordoned=True)), {"a": BAD}) == {}
    assert quarantined(two, {"gone": BAD}) == {}


def test_nothing_is_placed_on_an_avoided_node() -> None:
    held = replace(node("a"), quarantined="3 failures began here")
    assert set(free_on([held, node("b")], [])) == {"b"}


def test_a_node_that_fails_its_checks_is_looked_at_less_and_less_often() -> None:
    assert check_after(0) == CHECK_AFTER_SECONDS
    assert check_after(1) == 2 * CHECK_AFTER_SECONDS
    assert check_after(10_000) == LONGEST_CHECK_AFTER_SECONDS


def blamed_gpu(fact: GpuFault, **seat: tuple[str, ...]) -> str:
    """Return the GPU that is struck by a failure of rank 1 with this cause."""
    job = running(nodes=("a", "a"))
    seats = (job.seats[0], replace(job.seats[1], **seat))
    job = changed(job, seats=seats)
    event = failed(job, failure=replace(failure(rank=1), cause=fact))
    found = strike_of(after(job, event), event)
    assert found is not None
    return found.gpu_uuid


def test_the_gpu_that_the_hardware_names_is_struck_however_long_the_words_beside_it_are() -> None:
    two = {"gpu_uuids": ("GPU-6", "GPU-7"), "gpu_ids": ("6", "7")}
    words = "kernel: " + 300 * "x"
    assert blamed_gpu(Xid(rank=1, gpu_uuid="GPU-7", number=79, said=words), **two) == "GPU-7"
    assert blamed_gpu(GpuLost(rank=1, gpu_uuid="GPU-6"), **two) == "GPU-6"
    assert blamed_gpu(GpuLost(rank=1, said=words), **two) == "", "either of the two may be meant"
    assert blamed_gpu(GpuLost(rank=1, said=words)) == "GPU-1"


def test_a_script_that_names_a_gpu_in_its_words_strikes_none() -> None:
    job = running(nodes=("a", "a"))
    said = PythonException(rank=0, error_type="RuntimeError", said="GPU-0 GPU is lost")
    event = failed(job, failure=replace(failure(rank=0), cause=said))
    assert strike_of(after(job, event), event) is None
