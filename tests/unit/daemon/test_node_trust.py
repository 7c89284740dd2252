"""A node that keeps failing is avoided until it passes its health check, or a person trusts it."""

from __future__ import annotations

import asyncio

from orchestrator.core.ids import JobId
from orchestrator.core.trust import CHECK_AFTER_SECONDS
from orchestrator.daemon.node_trust import NodeTrust
from orchestrator.daemon.node_views import node_view
from orchestrator.runtime.node_agent import NodeReport
from tests.unit.core.builders import T0, after, changed, failed, failure, node, nodes, running

PLACES = nodes(node("a"), node("b"))


class Cluster:
    """A clock that is set, and nodes that say what a test wants."""

    def __init__(self) -> None:
        self.now = T0
        self.problems: tuple[str, ...] = ()
        self.checked: list[str] = []
        self.trust = NodeTrust(lambda: self.now)

    def strike(self, times: int) -> bool:
        newly = False
        for number in range(times):
            job = changed(running(), id=JobId(f"digits-{number:06d}"))
            event = failed(job, failure=failure(code="gpu_lost", rank=0), at=self.now)
            newly = self.trust.observe(after(job, event), event) or newly
        return newly

    def avoided(self) -> str:
        return self.trust.mark(PLACES)["a"].avoided

    def look(self) -> bool:
        async def check(node_id: str) -> tuple[str, ...]:
            self.checked.append(node_id)
            return self.problems

        return asyncio.run(self.trust.look(check))


def test_it_is_avoided_and_shown_with_the_reason() -> None:
    cluster = Cluster()
    assert not cluster.strike(2)
    assert cluster.avoided() == ""
    assert cluster.strike(1)
    marked = cluster.trust.mark(PLACES)
    assert not marked["a"].schedulable
    assert marked["b"].schedulable
    report = NodeReport(
        node_id="a",
        hostname="a",
        agent_pid=1,
        version="1",
        python="/p",
        node_dir="/n",
        simulated_node="a",
        home="/h",
        home_shared=True,
        gpus=(),
        problems=(),
    )
    view = node_view(marked["a"], report, [], marked)
    assert view.state == "AVOIDED"
    assert view.reason.startswith("3 failures began here, the last: digits-000000, rank 0 was killed; its health")


def test_its_health_is_looked_at_in_time_and_a_good_one_is_trusted() -> None:
    cluster = Cluster()
    cluster.strike(3)
    assert not cluster.look()
    assert cluster.checked == []
    cluster.now += CHECK_AFTER_SECONDS
    assert cluster.look()
    assert (cluster.checked, cluster.avoided()) == (["a"], "")
    assert not cluster.strike(1), "the old strikes are forgotten"


def test_a_bad_one_stays_avoided_with_what_the_check_found() -> None:
    cluster = Cluster()
    cluster.strike(3)
    cluster.now += CHECK_AFTER_SECONDS
    cluster.problems = ("cuda:0 multiplies wrongly",)
    assert cluster.look()
    assert cluster.avoided() == "its health check failed: cuda:0 multiplies wrongly"
    assert not cluster.look(), "not again at once"
    cluster.now += 2 * CHECK_AFTER_SECONDS
    cluster.problems = ()
    assert cluster.look()
    assert cluster.avoided() == ""


def test_a_person_may_trust_it_at_once() -> None:
    cluster = Cluster()
    cluster.strike(3)
    cluster.trust.forgive("a")
    assert cluster.avoided() == ""
