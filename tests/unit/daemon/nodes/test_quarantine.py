"""A node that keeps failing is quarantined until it passes its health check, or a user ends the quarantine."""

from __future__ import annotations

import asyncio

from orchestrator.core.diagnosis.quarantine import CHECK_AFTER_SECONDS
from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.faults import DeviceWrong, RepeatedFailures
from orchestrator.core.ids import JobId
from orchestrator.daemon.nodes.quarantine import NodeQuarantine
from orchestrator.daemon.nodes.requests import node_view
from orchestrator.store.records import StoredPlace
from tests.support.nodes import node_report
from tests.support.stores import new_store
from tests.unit.core.builders import T0, after, changed, failed, failure, node, nodes, running

PLACES = nodes(node("a"), node("b"))


class Cluster:
    """A clock that is set, and nodes with problems that a test sets."""

    def __init__(self) -> None:
        self.now = T0
        self.problems: tuple[Fact, ...] = ()
        self.checked: list[str] = []
        self.quarantine = NodeQuarantine(lambda: self.now)

    def strike(self, times: int, *, first: int = 0) -> bool:
        newly = False
        for number in range(first, first + times):
            job = changed(running(), id=JobId(f"digits-{number:06d}"), seats=())
            event = failed(job, failure=failure(code="gpu_lost", rank=0), at=self.now)
            newly = self.quarantine.observe(after(job, event), event) or newly
        return newly

    def quarantined(self) -> str:
        reason = self.quarantine.mark(PLACES)["a"].quarantined
        return "" if reason is None else reason.sentence()

    def look(self) -> bool:
        async def check(node_id: str) -> tuple[Fact, ...]:
            self.checked.append(node_id)
            return self.problems

        return asyncio.run(self.quarantine.look(check))


def test_it_is_avoided_and_shown_with_the_reason() -> None:
    cluster = Cluster()
    assert not cluster.strike(2)
    assert cluster.quarantined() == ""
    assert cluster.strike(1, first=2)
    marked = cluster.quarantine.mark(PLACES)
    assert not marked["a"].schedulable
    assert marked["b"].schedulable
    view = node_view(marked["a"], node_report(), [])
    assert view.state == "QUARANTINED"
    assert view.reason.startswith(
        "3 failures began here, the last: digits-000000, rank 0: its GPU went away; its health"
    )


def test_a_clock_that_was_set_back_does_not_prolong_the_quarantine() -> None:
    cluster = Cluster()
    cluster.strike(3)
    cluster.now -= 90_000.0
    assert cluster.look()
    assert cluster.quarantined() == ""


def test_its_health_is_looked_at_in_time_and_a_good_one_is_trusted() -> None:
    cluster = Cluster()
    cluster.strike(3)
    assert not cluster.look()
    assert cluster.checked == []
    cluster.now += CHECK_AFTER_SECONDS
    assert cluster.look()
    assert (cluster.checked, cluster.quarantined()) == (["a"], "")
    assert not cluster.strike(1, first=3), "the old strikes are forgotten"


def test_a_bad_one_stays_avoided_with_what_the_check_found() -> None:
    cluster = Cluster()
    cluster.strike(3)
    cluster.now += CHECK_AFTER_SECONDS
    cluster.problems = (DeviceWrong(device="cuda:0", operation="multiply"),)
    assert cluster.look()
    assert cluster.quarantined() == "its health check failed: cuda:0 multiplies wrongly"
    assert not cluster.look(), "not again at once"
    cluster.now += 2 * CHECK_AFTER_SECONDS
    cluster.problems = ()
    assert cluster.look()
    assert cluster.quarantined() == ""


def test_a_person_may_trust_it_at_once() -> None:
    cluster = Cluster()
    cluster.strike(3)
    cluster.quarantine.forgive("a")
    assert cluster.quarantined() == ""


def restarted(cluster: Cluster) -> NodeQuarantine:
    """Return the quarantine that a daemon restores from the record of the daemon before it."""
    store = new_store()

    async def through() -> list[StoredPlace]:
        await store.put_places(cluster.quarantine.unsaved())
        return await store.places()

    quarantine = NodeQuarantine(lambda: cluster.now)
    quarantine.restore(asyncio.run(through()))
    return quarantine


def test_a_restarted_daemon_knows_whom_it_avoids_and_whom_a_person_cordoned() -> None:
    cluster = Cluster()
    cluster.strike(3)
    cluster.quarantine.cordon("b", "b", "ann")
    quarantine = restarted(cluster)
    again = quarantine.mark(nodes(node("a"), node("b"), node("c")))
    assert isinstance(again["a"].quarantined, RepeatedFailures)
    assert again["b"].cordoned
    assert again["c"].schedulable
    assert quarantine.unsaved() == []
    quarantine.forgive("b")
    assert [(p.kind, p.name) for p in quarantine.unsaved()] == [("node", "b")]
    assert not quarantine.mark(PLACES)["b"].cordoned


def test_what_weighs_nothing_any_more_is_forgotten_by_the_next_daemon() -> None:
    cluster = Cluster()
    cluster.strike(1)
    cluster.quarantine.cordon("b", "b", "ann")
    written = cluster.quarantine.unsaved()
    assert {p.name for p in written if p.body is not None} == {"a", "b"}
    cluster.now += 13 * 3600.0
    quarantine = NodeQuarantine(lambda: cluster.now)
    quarantine.restore(written)
    assert [(p.name, p.body) for p in quarantine.unsaved() if p.kind == "node"] == [("a", None)]
    assert quarantine.mark(PLACES)["b"].cordoned, "what a person did holds until a person takes it back"


def test_the_same_failure_read_again_is_one_strike_and_a_forgiven_one_is_none() -> None:
    cluster = Cluster()
    cluster.strike(2)
    cluster.quarantine = restarted(cluster)
    assert not cluster.strike(2), "as when a restarted daemon reads the events of its live jobs"
    cluster.now += 1
    cluster.quarantine.forgive("a")
    cluster.quarantine = restarted(cluster)
    cluster.now -= 1
    assert not cluster.strike(3)
    assert cluster.quarantined() == ""


def test_a_node_with_a_new_id_is_known_by_its_name() -> None:
    cluster = Cluster()
    cluster.strike(3)
    cluster.quarantine.mark(nodes(node("a", name="host-a"), node("b")))
    later = nodes(node("x", name="host-a"), node("b"))
    assert cluster.quarantine.mark(later)["x"].quarantined
    assert {(p.kind, p.name, p.body is None) for p in cluster.quarantine.unsaved()} == {
        ("node", "a", True),
        ("node", "x", False),
    }
    twice = nodes(node("y", name="host-a"), node("z", name="host-a"))
    assert not any(n.quarantined for n in cluster.quarantine.mark(twice).values()), "which of them it is cannot be told"


def test_a_gpu_that_fails_twice_is_avoided_before_its_node_is() -> None:
    cluster = Cluster()
    job = running()
    (gpu,) = job.seats[0].gpu_uuids
    for at in (T0 - 1, T0):
        event = failed(job, failure=failure(code="gpu_ecc", rank=0), at=at)
        newly = cluster.quarantine.observe(after(job, event), event)
    assert newly
    assert list(cluster.quarantine.quarantined_gpus) == [gpu]
    assert cluster.quarantined() == ""
    cluster.quarantine = restarted(cluster)
    assert list(cluster.quarantine.quarantined_gpus) == [gpu]
    cluster.now += CHECK_AFTER_SECONDS
    assert cluster.look()
    assert cluster.checked == ["a"], "the check of its node tries every GPU"
    assert cluster.quarantine.quarantined_gpus == {}


def test_what_could_not_be_written_is_told_again_and_what_is_old_is_not_kept() -> None:
    cluster = Cluster()
    cluster.strike(1)
    told = cluster.quarantine.unsaved()
    assert cluster.quarantine.unsaved() == []
    cluster.quarantine.keep(told)
    assert cluster.quarantine.unsaved() == told
    cluster.quarantine.keep(told)
    cluster.now += 24 * 3600
    assert [p.body for p in cluster.quarantine.unsaved()] == [None]
